"""What to do about an anomaly: the policy's ladder. Pure: data in, a decision out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from surefoot.checkpoint.attempts import SkipWindow
from surefoot.checkpoint.ids import CheckpointId
from surefoot.events import AnomalyKind, Severity
from surefoot.policy import LearningRateCut, PolicySpec, RungAction, RungSpec


@dataclass(frozen=True)
class Trouble:
    """What was seen, and where.

    Attributes:
        kind: What is wrong.
        severity: How bad it is.
        onset_step: First suspected step.
        onset_position: Batch position of that step, None where it is not known.
        step: The step whose numbers decided it.
        position: Batch position of that step, None where it is not known.
    """

    kind: AnomalyKind
    severity: Severity
    onset_step: int
    onset_position: int | None
    step: int
    position: int | None


@dataclass(frozen=True)
class Use:
    """One time that a rung was used for the job, whatever came of it."""

    rung: str
    at: datetime
    step: int | None


@dataclass(frozen=True)
class LearningRate:
    """A factor on the schedule's learning rate from the next step on.

    Attributes:
        factor: Absolute.
        hold_steps: Steps with it, None for ever.
        rewarm_steps: Steps over which it then returns to 1.
    """

    factor: float = 1.0
    hold_steps: int | None = None
    rewarm_steps: int = 0

    def cut(self, by: LearningRateCut) -> LearningRate:
        """Return the rate after a cut; never higher than it is."""
        factor = min(self.factor, max(by.floor, self.factor * by.cut))
        if factor == self.factor:
            return self
        return LearningRate(factor, by.hold_steps, by.rewarm_steps)

    def __str__(self) -> str:
        if self.hold_steps is None:
            return f"learning rate x {self.factor:g}"
        return f"learning rate x {self.factor:g} for {self.hold_steps} steps, back over {self.rewarm_steps}"


@dataclass(frozen=True)
class Situation:
    """What a decision depends on, beside the policy and the trouble.

    Attributes:
        now: UTC.
        step: Last completed step.
        rate: The present learning rate.
        uses: Of all rungs for this job, any incident.
        tried: Rungs that this incident has behind it.
        stable: STABLE checkpoints on the present lineage, newest first, without those that were refused.
        went_back_to: Where this incident rolled back to last, None if it has not.
    """

    now: datetime
    step: int
    rate: LearningRate = LearningRate()
    uses: tuple[Use, ...] = ()
    tried: frozenset[str] = frozenset()
    stable: tuple[CheckpointId, ...] = ()
    went_back_to: CheckpointId | None = None


@dataclass(frozen=True)
class Decision:
    """What to do.

    Attributes:
        action: None: nothing is left to do; a person is needed.
        rung: Name of the rung, None with no action.
        reason: Why, with the numbers; one sentence for people.
        target: Where to, for roll-backs (`ROLLBACK`, `OLDER_CHECKPOINT`).
        rate: From then on.
        skip: Batch positions to leave out, None for none.
    """

    action: RungAction | None
    rung: str | None
    reason: str
    target: CheckpointId | None = None
    rate: LearningRate = LearningRate()
    skip: SkipWindow | None = None


class _Unusable(Exception):
    """Why a rung cannot be used now."""


def decide(policy: PolicySpec, trouble: Trouble, situation: Situation) -> Decision | None:
    """Return what to do about a trouble, or that nothing is left; None: no rung is for such a trouble at all.

    The first rung after those tried that fits, has budget, has cooled down and can be done.
    """
    if not any(rung.fits(trouble.kind, trouble.severity) for rung in policy.ladder):
        return None
    passed: list[str] = []
    for rung in _later_rungs(policy, trouble, situation.tried):
        try:
            _check_budget(rung, situation)
            return _use(rung, policy, trouble, situation, passed)
        except _Unusable as why:
            passed.append(f"{rung.name} ({why})")
    return Decision(None, None, _sentence(trouble, "the ladder is used up; a person is needed", passed))


def _later_rungs(policy: PolicySpec, trouble: Trouble, tried: frozenset[str]) -> Iterator[RungSpec]:
    names = [rung.name for rung in policy.ladder]
    first = max((names.index(name) + 1 for name in tried if name in names), default=0)
    return (rung for rung in policy.ladder[first:] if rung.fits(trouble.kind, trouble.severity))


def _check_budget(rung: RungSpec, situation: Situation) -> None:
    if rung.action is RungAction.STOP:  # stopping is never refused
        return
    uses = [use for use in situation.uses if use.rung == rung.name]
    since = situation.now - timedelta(seconds=rung.window_seconds)
    num_recent = sum(use.at > since for use in uses)
    if num_recent >= rung.max_per_window:
        raise _Unusable(f"used {num_recent} of {rung.max_per_window} times within {rung.window_seconds:g} s")
    last_step = max((use.step for use in uses if use.step is not None), default=None)
    # A step before the last use, after a roll-back, has not cooled down either.
    if last_step is not None and situation.step - last_step < rung.cool_down_steps:
        raise _Unusable(f"last used at step {last_step}, cools down for {rung.cool_down_steps} steps")


def _use(rung: RungSpec, policy: PolicySpec, trouble: Trouble, situation: Situation, passed: list[str]) -> Decision:
    match rung.action:
        case RungAction.NONE:
            text = f"wait {rung.wait_steps} steps and see"
            return Decision(rung.action, rung.name, _sentence(trouble, text, passed), rate=situation.rate)
        case RungAction.STOP:
            return Decision(rung.action, rung.name, _sentence(trouble, "save and stop", passed), rate=situation.rate)
        case RungAction.LR_CUT:
            return _cut(rung, policy, trouble, situation, passed)
        case RungAction.ROLLBACK | RungAction.OLDER_CHECKPOINT:
            return _go_back(rung, policy, trouble, situation, passed)


def _cut(rung: RungSpec, policy: PolicySpec, trouble: Trouble, situation: Situation, passed: list[str]) -> Decision:
    rate = situation.rate.cut(policy.lr)
    if rate == situation.rate:
        raise _Unusable(f"the learning rate cannot be cut below x {rate.factor:g}")
    return Decision(RungAction.LR_CUT, rung.name, _sentence(trouble, str(rate), passed), rate=rate)


def _go_back(rung: RungSpec, policy: PolicySpec, trouble: Trouble, situation: Situation, passed: list[str]) -> Decision:
    newest_step = max(0, trouble.onset_step - policy.rollback_margin_steps)
    target = _newest(situation, newest_step)
    if rung.action is RungAction.OLDER_CHECKPOINT:
        steps = [checkpoint.step for checkpoint in (target, situation.went_back_to) if checkpoint is not None]
        newest_step = min([newest_step, *(step - 1 for step in steps)])
        target = _newest(situation, newest_step)
    if target is None:
        missing = f"no STABLE checkpoint at step {newest_step} or before"
        # A lower learning rate cannot mend weights that are not finite.
        if rung.action is RungAction.OLDER_CHECKPOINT or trouble.kind is AnomalyKind.NONFINITE:
            raise _Unusable(missing)
        return _cut(rung, policy, trouble, situation, [*passed, f"a roll-back ({missing})"])
    rate = situation.rate.cut(policy.lr) if rung.cut_lr else situation.rate
    skip = _skip_window(policy, trouble) if rung.skip_data else None
    text = (
        f"back to step {target.step} of attempt {target.attempt}, the newest STABLE checkpoint "
        f"at step {newest_step} or before; {rate}; {_skip_text(rung, skip)}"
    )
    return Decision(rung.action, rung.name, _sentence(trouble, text, passed), target, rate, skip)


def _newest(situation: Situation, at_most_step: int) -> CheckpointId | None:
    return next((checkpoint for checkpoint in situation.stable if checkpoint.step <= at_most_step), None)


def _skip_window(policy: PolicySpec, trouble: Trouble) -> SkipWindow | None:
    """Return what may have caused the trouble: from a margin before its onset to where it was detected."""
    if trouble.onset_position is None or trouble.position is None:
        return None
    start = max(0, min(trouble.onset_position, trouble.position) - policy.skip_margin_steps)
    return SkipWindow(start=start, stop=trouble.position + 1)


def _skip_text(rung: RungSpec, skip: SkipWindow | None) -> str:
    if skip is not None:
        return f"batches {skip.start} to {skip.stop - 1} are left out"
    return "no batches are left out" + (", their positions are not known" if rung.skip_data else "")


def _sentence(trouble: Trouble, text: str, passed: list[str]) -> str:
    after = f" Not possible: {', '.join(passed)}." if passed else ""
    return f"{trouble.kind} from step {trouble.onset_step} ({trouble.severity}): {text}.{after}"
