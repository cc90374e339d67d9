"""Each rule on a curve that breaks it, and on those that nearly do."""

from __future__ import annotations

import math

import pytest

from helpers.detector import Fed, falling, flat, raised


def rules(fed):
    return [finding.rule for finding in fed.critical]


@pytest.mark.parametrize("seed", range(20))
def test_healthy_runs_are_silent(seed):
    for points in (falling(300, seed=seed), flat(300, seed=seed), flat(300, seed=seed, noise=0.2)):
        fed = Fed().feed(points)
        assert fed.critical == []
        assert fed.through >= 295


@pytest.mark.parametrize("loss", [1.09, 1.3, 1.8])
def test_a_single_batch_outlier_is_a_warning(loss):
    fed = Fed().feed(raised(flat(300), 200, 201, loss, norm=1.5))
    assert [(f.severity, f.kind, f.onset.step, f.at.step) for f in fed.raised] == [("warning", "spike", 200, 200)]
    assert [(h.onset_step, h.at.step) for h in fed.healed] == [(200, 202)]
    assert fed.through >= 298


def test_a_gradient_spike_without_effect_on_the_loss_is_a_warning():
    fed = Fed().feed(raised(flat(300), 200, 202, norm=20.0))
    assert [(f.severity, f.kind, f.onset.step) for f in fed.raised] == [("warning", "exploding_gradient", 200)]


def test_loss_and_gradient_norm_together():
    fed = Fed().feed(raised(flat(300), 200, 201, 1.3, norm=6.0))
    assert [(f.rule, f.kind, f.onset.step, f.at.step) for f in fed.critical] == [
        ("loss_and_gradient", "spike", 200, 200)
    ]


def test_a_spike_with_a_tail():
    points = raised(raised(flat(300), 200, 201, 1.3), 201, 203, 1.07)
    fed = Fed().feed(points)
    assert [(f.rule, f.onset.step, f.at.step) for f in fed.critical] == [("tail", 200, 202)]


def test_three_elevated_points():
    fed = Fed().feed(raised(flat(300, noise=0.015), 200, 230, 1.09))
    assert fed.critical[0].onset.step == 200
    assert fed.critical[0].at.step <= 203


def test_a_jump_needs_one_point():
    fed = Fed().feed(raised(flat(300), 200, 201, 2.6))
    assert [(f.rule, f.onset.step, f.at.step) for f in fed.critical] == [("jump", 200, 200)]


def test_a_slow_divergence():
    points = flat(200) + [p._replace(loss=p.loss * math.exp(0.0005 * i)) for i, p in enumerate(flat(400, seed=2))]
    fed = Fed().feed(points)
    assert fed.critical[0].kind == "divergence"
    assert 190 <= fed.critical[0].onset.step <= 260
    assert fed.critical[0].at.step < 330


def test_gradients_that_explode():
    fed = Fed().feed(raised(flat(300), 200, 240, norm=8.0))
    assert [(f.rule, f.kind, f.onset.step, f.at.step) for f in fed.critical] == [
        ("gradient_run", "exploding_gradient", 200, 202)
    ]


def test_a_noisy_loss_follows_the_gradient_norm():
    """A bad update of a small model: the norm rises at once, the loss by little more than its noise, and later."""
    fed = Fed().feed(raised(raised(falling(260), 193, 260, norm=3.0), 196, 260, 1.15))
    assert fed.critical[0].rule in ("loss_after_gradient", "loss_and_gradient")
    assert 191 <= fed.critical[0].onset.step <= 196
    assert fed.critical[0].at.step <= 206


def test_a_blow_up_in_the_warm_up():
    fed = Fed().feed(raised(flat(60), 12, 20, 2.5))
    assert [(f.rule, f.onset.step) for f in fed.critical] == [("rise_in_warm_up", 12)]
    assert fed.cleared[0].through_step >= 30


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 0.0])
def test_a_loss_that_is_none_and_went_into_the_weights(loss):
    points = flat(100)
    points[0 if loss != loss else 60] = points[60]._replace(loss=loss)
    fed = Fed().feed(points)
    assert [(f.kind, f.severity) for f in fed.raised] == [("nonfinite", "critical")]
    assert len(fed.healed) == 1


def test_a_skipped_update_is_a_warning_and_three_are_not():
    points = flat(120)
    for i in (50, 90, 91, 92):
        points[i] = points[i]._replace(loss=math.nan, applied=False)
    fed = Fed().feed(points)
    assert [(f.severity, f.onset.step, f.at.step) for f in fed.raised] == [
        ("warning", 51, 51),
        ("warning", 91, 91),
        ("critical", 91, 93),
    ]


def test_a_loss_scaler_may_look_for_its_scale():
    points = flat(120)
    for i in (0, 1, 2, 3, 40, 80):
        points[i] = points[i]._replace(grad_norm=math.inf, applied=False)
    assert Fed().feed(points).critical == []


def test_nan_from_the_first_step_is_said_once():
    fed = Fed().feed([p._replace(loss=math.nan, grad_norm=math.nan) for p in flat(900)])
    assert [(f.severity, f.at.step) for f in fed.raised] == [("critical", 1)]
    assert fed.cleared == []


def test_a_raised_learning_rate_explains_a_slow_rise_and_no_jump():
    def points(loss):
        early = flat(200)
        cut = [p._replace(learning_rate=1e-4) for p in flat(100, seed=2)]
        late = [p._replace(loss=p.loss * loss) for p in flat(60, seed=3)]
        return early + cut + late

    assert Fed().feed(points(1.15)).critical == []
    assert Fed().feed(points(1.15)).raised != []
    assert rules(Fed().feed(points(2.6))) != []
    unknown = [p._replace(learning_rate=None) for p in points(1.15)]
    assert rules(Fed().feed(unknown)) != []


def test_losses_below_zero_have_only_the_other_rules():
    fed = Fed().feed([p._replace(loss=-p.loss) for p in raised(flat(300), 200, 240, norm=8.0)])
    assert rules(fed) == ["gradient_run"]
    assert fed.through > 190


def test_without_gradient_norms():
    fed = Fed().feed([p._replace(grad_norm=None) for p in raised(flat(300), 200, 230, 1.2)])
    assert fed.critical[0].onset.step == 200
