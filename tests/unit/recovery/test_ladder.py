"""What to do about an anomaly, for any policy and any history."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from surefoot.checkpoint.attempts import SkipWindow
from surefoot.checkpoint.ids import CheckpointId
from surefoot.events import AnomalyKind, Severity
from surefoot.policy import LearningRateCut, PolicySpec, RungAction, RungSpec
from surefoot_recovery.ladder import Decision, LearningRate, Situation, Trouble, Use, decide

NOW = datetime(2026, 12, 1, 12, 0, tzinfo=UTC)
NAMES = ("a", "b", "c", "d", "e")

rungs = st.builds(
    RungSpec,
    name=st.just("x"),
    kinds=st.lists(st.sampled_from(AnomalyKind), max_size=2).map(tuple),
    severity=st.sampled_from(Severity),
    action=st.sampled_from(RungAction),
    max_per_window=st.integers(0, 3),
    window_seconds=st.floats(1, 1e4),
    cool_down_steps=st.integers(0, 50),
    skip_data=st.booleans(),
    cut_lr=st.booleans(),
)
ladders = st.lists(rungs, min_size=1, max_size=5).map(
    lambda found: tuple(rung.model_copy(update={"name": name}) for rung, name in zip(found, NAMES, strict=False))
)
cuts = st.builds(LearningRateCut, cut=st.floats(0.01, 1), floor=st.floats(0.01, 1))
policies = st.builds(
    PolicySpec,
    ladder=ladders,
    lr=cuts,
    rollback_margin_steps=st.integers(0, 100),
    skip_margin_steps=st.integers(0, 50),
)
troubles = st.builds(
    lambda kind, severity, onset, late, known: Trouble(
        kind, severity, onset, onset + 7 if known else None, onset + late, onset + late + 7
    ),
    st.sampled_from(AnomalyKind),
    st.sampled_from(Severity),
    st.integers(0, 500),
    st.integers(0, 50),
    st.booleans(),
)
uses = st.builds(
    Use,
    rung=st.sampled_from(NAMES),
    at=st.floats(0, 2e4).map(lambda age: NOW - timedelta(seconds=age)),
    step=st.none() | st.integers(0, 600),
)
situations = st.builds(
    Situation,
    now=st.just(NOW),
    step=st.integers(0, 600),
    rate=st.builds(LearningRate, factor=st.floats(0.001, 2)),
    uses=st.lists(uses, max_size=6).map(tuple),
    tried=st.frozensets(st.sampled_from(NAMES)),
    stable=st.lists(st.builds(CheckpointId, st.integers(1, 3), st.integers(1, 600)), max_size=6).map(
        lambda found: tuple(sorted(found, reverse=True))
    ),
    went_back_to=st.none() | st.builds(CheckpointId, st.integers(1, 3), st.integers(1, 600)),
)


@given(policies, troubles, situations)
def test_a_decision_keeps_to_the_policy(policy: PolicySpec, trouble: Trouble, situation: Situation) -> None:
    decision = decide(policy, trouble, situation)
    if decision is None:
        assert not any(rung.fits(trouble.kind, trouble.severity) for rung in policy.ladder)
        return
    if decision.action is None:
        assert decision.rung is None
        return
    rung = next(rung for rung in policy.ladder if rung.name == decision.rung)
    assert rung.fits(trouble.kind, trouble.severity)
    assert policy.ladder.index(rung) > max((NAMES.index(name) for name in situation.tried if name in
                                            NAMES[: len(policy.ladder)]), default=-1)  # fmt: skip
    assert decision.rate.factor <= situation.rate.factor
    _keeps_to_its_budget(rung, situation)
    _goes_where_it_may(policy, trouble, situation, rung, decision)


def _keeps_to_its_budget(rung: RungSpec, situation: Situation) -> None:
    if rung.action is RungAction.STOP:
        return
    own = [use for use in situation.uses if use.rung == rung.name]
    recent = [use for use in own if (situation.now - use.at).total_seconds() < rung.window_seconds]
    assert len(recent) < rung.max_per_window
    assert all(use.step is None or situation.step - use.step >= rung.cool_down_steps for use in own)


def _goes_where_it_may(
    policy: PolicySpec, trouble: Trouble, situation: Situation, rung: RungSpec, decision: Decision
) -> None:
    if decision.action is RungAction.LR_CUT:
        assert decision.rate.factor < situation.rate.factor
        assert decision.rate.factor >= min(policy.lr.floor, situation.rate.factor)
    if decision.target is None:
        assert decision.action not in (RungAction.ROLLBACK, RungAction.OLDER_CHECKPOINT)
        return
    newest = trouble.onset_step - policy.rollback_margin_steps
    allowed = [checkpoint for checkpoint in situation.stable if checkpoint.step <= newest]
    assert decision.target in allowed
    if decision.action is RungAction.ROLLBACK:
        assert decision.target == allowed[0]
    elif situation.went_back_to is not None:
        assert decision.target.step < situation.went_back_to.step
    if decision.skip is not None:
        assert trouble.onset_position is not None
        assert trouble.position is not None
        assert decision.skip.start <= trouble.onset_position
        assert decision.skip.stop == trouble.position + 1
        assert rung.skip_data


@given(policies, troubles, situations)
def test_the_ladder_ends(policy: PolicySpec, trouble: Trouble, situation: Situation) -> None:
    tried: frozenset[str] = frozenset()
    for _ in range(len(policy.ladder) + 1):
        now = Situation(NOW, situation.step, situation.rate, situation.uses, tried, situation.stable)
        decision = decide(policy, trouble, now)
        if decision is None or decision.rung is None:
            return
        tried |= {decision.rung}
    pytest.fail("more rungs were used than there are")


def situation(**fields: object) -> Situation:
    return Situation(**({"now": NOW, "step": 193, "stable": (CheckpointId(1, 150), CheckpointId(1, 80))} | fields))


SPIKE = Trouble(AnomalyKind.SPIKE, Severity.CRITICAL, 191, 191, 193, 193)
NONFINITE = Trouble(AnomalyKind.NONFINITE, Severity.CRITICAL, 191, 191, 193, 193)


def test_the_default_ladder_for_a_spike() -> None:
    policy = PolicySpec()
    first = decide(policy, SPIKE, situation())
    assert first is not None
    assert (first.action, first.rate) == (RungAction.LR_CUT, LearningRate(0.5, 50, 50))
    second = decide(policy, SPIKE, situation(tried={"lr-cut"}, rate=LearningRate(0.5, 10, 50)))
    assert second is not None
    assert (second.action, second.target) == (RungAction.ROLLBACK, CheckpointId(1, 80))
    assert (second.rate.factor, second.skip) == (0.25, SkipWindow(start=171, stop=194))
    last = decide(policy, SPIKE, situation(tried={"rollback"}))
    assert last is not None
    assert last.action is RungAction.STOP
    assert "older-checkpoint (no STABLE checkpoint at step 79 or before)" in last.reason


def test_weights_that_are_not_finite_are_not_mended_by_a_lower_learning_rate() -> None:
    decision = decide(PolicySpec(), NONFINITE, situation(tried={"leave-out"}, stable=()))
    assert decision is not None
    assert decision.action is RungAction.STOP


def test_a_used_up_ladder_says_what_was_not_possible() -> None:
    rung = RungSpec(name="only", action=RungAction.ROLLBACK, max_per_window=1, window_seconds=60)
    used = situation(uses=(Use("only", NOW - timedelta(seconds=5), 100),))
    decision = decide(PolicySpec(ladder=(rung,)), SPIKE, used)
    assert decision == Decision(
        None,
        None,
        "spike from step 191 (critical): the ladder is used up; a person is needed. "
        "Not possible: only (used 1 of 1 times within 60 s).",
    )


def test_a_step_before_the_first_is_not_spoken_of() -> None:
    early = Trouble(AnomalyKind.SPIKE, Severity.CRITICAL, 91, 91, 93, 93)
    decision = decide(PolicySpec(), early, situation(tried={"lr-cut"}, step=93, stable=()))
    assert decision is not None
    assert "no STABLE checkpoint at step 0 or before" in decision.reason
    assert "step -" not in decision.reason


STEP_FIELDS = ("probation_steps", "rollback_margin_steps", "skip_margin_steps", "answer_within_steps")


@pytest.mark.parametrize("field", STEP_FIELDS)
def test_steps_and_seconds_have_bounds(field: str) -> None:
    assert getattr(PolicySpec.model_validate({field: 2**31 - 1}), field) == 2**31 - 1
    with pytest.raises(ValidationError):
        PolicySpec.model_validate({field: 2**31})
    for lr in ({"hold_steps": 2**31}, {"rewarm_steps": 2**31}):
        with pytest.raises(ValidationError):
            LearningRateCut.model_validate(lr)
    for rung in ({"wait_steps": 2**31}, {"cool_down_steps": 2**31}, {"window_seconds": 1e300}):
        with pytest.raises(ValidationError):
            RungSpec.model_validate({"name": "x", "action": "none"} | rung)


@pytest.mark.parametrize(("factor", "cut"), [(1.0, 0.5), (0.3, 0.15), (0.15, 0.1), (0.1, 0.1), (0.04, 0.04)])
def test_a_cut_ends_at_the_floor_and_never_raises(factor: float, cut: float) -> None:
    assert LearningRate(factor).cut(LearningRateCut()).factor == pytest.approx(cut)
