from __future__ import annotations

import json
import math

from surefoot.sdk.trained import NUM_LOSSES, Counters


def trained(*losses, seconds=0.5):
    counters = Counters()
    for loss in losses:
        counters.complete_step(updated=math.isfinite(loss), seconds=seconds, loss=loss)
    return counters


def test_the_loss_of_a_checkpoint_is_the_mean_of_the_last_steps():
    scalars = trained(*range(100)).to_scalars()
    assert scalars["losses"] == list(range(100 - NUM_LOSSES, 100))
    assert scalars["loss"] == 89.5
    assert scalars["trained_seconds"] == 50.0


def test_a_loss_that_is_not_finite_is_left_out():
    counters = trained(2.0, math.nan, math.inf, 4.0)
    assert counters.to_scalars() | {"trained_seconds": 0} == {
        "step": 4, "updates": 2, "losses": [2.0, 4.0], "loss": 3.0, "trained_seconds": 0,
    }  # fmt: skip
    assert trained(math.nan).to_scalars()["loss"] is None


def test_a_restored_job_goes_on_with_the_same_numbers():
    """Killed and resumed at any step, the loss of later checkpoints is that of a run without the kill."""
    losses = [1.0 / (1 + n) for n in range(60)]
    whole = trained(*losses)
    for at in (0, 7, 20, 41):
        resumed = Counters.from_scalars(json.loads(json.dumps(trained(*losses[:at]).to_scalars())))
        for loss in losses[at:]:
            resumed.complete_step(updated=True, seconds=0.5, loss=loss)
        assert resumed == whole


def test_a_checkpoint_of_an_older_version_has_step_and_updates_only():
    assert Counters.from_scalars({"step": 7, "updates": 6, "state": {}}) == Counters(7, 6)


def test_time_goes_on_over_a_roll_back_and_losses_do_not():
    before = trained(1.0, 2.0, 30.0, 40.0)
    target = Counters.from_scalars(trained(1.0, 2.0).to_scalars())
    target.went_on_from(before)
    assert (target.trained_seconds, list(target.losses)) == (2.0, [1.0, 2.0])


def test_an_attempt_from_the_present_state_keeps_both():
    before = trained(1.0, 2.0)
    here = Counters(2, 2)
    here.went_on_from(before)
    assert here == before
