"""What recovery may do about which anomaly, how often, and in which order: the `policy` section of a spec.

The ladder is tried from its first rung. A rung takes part when the anomaly's kind and severity fit, its budget is not
used up and its cool-down is over; what did not heal goes on to a later rung. The defaults follow what was measured on
161 training runs: a single bad batch is gone at the next step, whereas of the excursions that are still high after
three steps only one in six recovers by itself within 500 steps.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from surefoot.events.anomaly import AnomalyKind, Severity
from surefoot.section import Section

MAX_STEPS = 2**31 - 1
"""More than any job trains, and what an integer column of the catalogue holds."""

MAX_SECONDS = 1e9
"""About 30 years: a time so long ago can still be computed."""


class RungAction(StrEnum):
    """What a rung does, from harmless to final."""

    NONE = "none"
    """Nothing but wait: the ranks leave out an update that is not finite by themselves."""
    LR_CUT = "lr_cut"
    """A lower learning rate for a while, from the state as it is."""
    ROLLBACK = "rollback"
    """Back, in process, to the newest STABLE checkpoint that is old enough."""
    OLDER_CHECKPOINT = "older_checkpoint"
    """Back further: to a STABLE checkpoint older than what `rollback` would take, and than where it went before."""
    STOP = "stop"
    """Save, stop, and call a person."""


class LearningRateCut(Section):
    """How the learning rate is cut: factor = max(floor, present factor x cut), held, then back to 1 linearly."""

    cut: float = Field(default=0.5, gt=0, le=1)
    """What the present factor is multiplied by; 1: never cut."""
    floor: float = Field(default=0.1, gt=0, le=1)
    """The factor never falls below this."""
    hold_steps: int = Field(default=50, ge=0, le=MAX_STEPS)
    """Steps with the lower learning rate."""
    rewarm_steps: int = Field(default=50, ge=0, le=MAX_STEPS)
    """Steps over which it then rises back to the schedule's."""


class RungSpec(Section):
    """One rung of the ladder."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")
    """What reports call it; each rung its own."""
    kinds: tuple[AnomalyKind, ...] = ()
    """Kinds of anomaly that it is for; empty: all."""
    severity: Severity = Severity.CRITICAL
    """Least severity that it is for."""
    action: RungAction
    """none, lr_cut, rollback, older_checkpoint or stop."""
    max_per_window: int = Field(default=1, ge=0)
    """How often it may be used within window_seconds, over all incidents of the job; 0: never."""
    window_seconds: float = Field(default=3600.0, gt=0, le=MAX_SECONDS)
    """See max_per_window."""
    cool_down_steps: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Completed steps that must lie between two uses of it."""
    wait_steps: int = Field(default=50, ge=1, le=MAX_STEPS)
    """Completed steps after which an incident that has not healed goes on to the next rung."""
    skip_data: bool = True
    """Roll-backs only: leave out the batches from skip_margin_steps before the onset to the detection."""
    cut_lr: bool = True
    """Roll-backs only: cut the learning rate as `lr` says."""

    def fits(self, kind: AnomalyKind, severity: Severity) -> bool:
        """Return whether the rung is for such an anomaly."""
        order = list(Severity)
        return (not self.kinds or kind in self.kinds) and order.index(severity) >= order.index(self.severity)


DEFAULT_LADDER = (
    # The ranks have left out that update already; a second look costs nothing when only one batch was bad.
    RungSpec(name="leave-out", kinds=(AnomalyKind.NONFINITE,), action=RungAction.NONE, max_per_window=3, wait_steps=10),
    RungSpec(name="lr-cut", kinds=(AnomalyKind.SPIKE,), action=RungAction.LR_CUT, max_per_window=2, wait_steps=50),
    RungSpec(name="rollback", action=RungAction.ROLLBACK, max_per_window=2, wait_steps=100),
    RungSpec(name="older-checkpoint", action=RungAction.OLDER_CHECKPOINT, window_seconds=6 * 3600.0, wait_steps=100),
    RungSpec(name="stop", action=RungAction.STOP),
)
"""What a job gets that says nothing."""


class PolicySpec(Section):
    """What recovery does by itself about anomalies of this job."""

    mode: Literal["act", "advise", "off"] = "act"
    """act: do it; advise: only write down what it would do; off: only write down what was seen."""
    probation_steps: int = Field(default=200, ge=0, le=MAX_STEPS)
    """Steps without suspicion after a checkpoint before it counts as STABLE, so that a roll-back may go to it."""
    rollback_margin_steps: int = Field(default=100, ge=0, le=MAX_STEPS)
    """A roll-back goes at least so many steps before the onset."""
    skip_margin_steps: int = Field(default=20, ge=0, le=MAX_STEPS)
    """The batches that are left out begin so many before the onset: trouble shows a step after its cause."""
    answer_within_steps: int = Field(default=20, ge=1, le=MAX_STEPS)
    """A command that the ranks have not answered after so many steps and answer_within_seconds is given up."""
    answer_within_seconds: float = Field(default=30.0, gt=0, le=MAX_SECONDS)
    """See answer_within_steps."""
    lr: LearningRateCut = LearningRateCut()
    """How the learning rate is cut."""
    ladder: tuple[RungSpec, ...] = DEFAULT_LADDER
    """The rungs, in the order in which they are tried; given: replaces the default ladder as a whole."""

    @model_validator(mode="after")
    def _ladder_makes_sense(self) -> PolicySpec:
        if not self.ladder:
            raise ValueError("ladder: needs a rung; mode: off is for doing nothing")
        names = [rung.name for rung in self.ladder]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"ladder: each rung needs a name of its own; repeated: {', '.join(repeated)}")
        return self
