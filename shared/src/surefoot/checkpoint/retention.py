"""Which checkpoints stay. Pure: facts in, decisions out; order comes from ids, never from a clock.

The rules are independent of each other and what any of them keeps is kept, so more rules, larger numbers, a pin or a
promotion never remove anything. Removing what was decided changes no later decision.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from surefoot.checkpoint.ids import CheckpointId

WRITER_PRUNES_KEY = "SUREFOOT_WRITER_PRUNES"
"""Set to "1" in the environment of a job's processes where a writer service carries out retention."""


class Policy(Protocol):
    """What is kept: `surefoot.spec.RetentionSpec`, which a drain need not import."""

    @property
    def keep_last(self) -> int | None: ...  # noqa: D102
    @property
    def keep_every_steps(self) -> int | None: ...  # noqa: D102
    @property
    def keep_best(self) -> int: ...  # noqa: D102
    @property
    def keep_stable(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class CheckpointFacts:
    """What retention needs to know of one committed checkpoint.

    Attributes:
        id: Which one.
        is_current: It is on the lineage of the newest attempt; otherwise it is abandoned.
        is_stable: It was promoted.
        is_pinned: Somebody wants to keep it.
        is_candidate: It may become STABLE one day: somebody promotes here, and nothing is known against it.
        is_verified: It was read back since it was written, and every byte was right.
        is_damaged: It is known to be damaged. Counts for no rule and is left to quarantine.
        loss: Mean training loss of the last steps before it, None where it is not known.
    """

    id: CheckpointId
    is_current: bool = True
    is_stable: bool = False
    is_pinned: bool = False
    is_candidate: bool = False
    is_verified: bool = False
    is_damaged: bool = False
    loss: float | None = None


def drain_prunes(environment: Mapping[str, str]) -> bool:
    """Return whether a job's drain carries out retention: where no writer service does.

    Args:
        environment: Of a process of the job.
    """
    return environment.get(WRITER_PRUNES_KEY) != "1"


def decide(
    checkpoints: Iterable[CheckpointFacts], policy: Policy, protected: Collection[CheckpointId] = ()
) -> list[tuple[CheckpointId, str]]:
    """Return what nothing keeps, oldest first, each with the reason as one sentence.

    Whatever the policy says, it keeps the newest current checkpoint, the newest current one that was verified, the
    oldest that may yet become STABLE, what is pinned, protected or known to be damaged, and, while nothing current is
    committed, everything.

    Args:
        checkpoints: All committed ones of a job.
        policy: The rules.
        protected: Others that must stay: what the newest attempt started from, what a pending command names.
    """
    every = sorted(checkpoints, key=lambda facts: facts.id)
    current = [facts for facts in every if facts.is_current and not facts.is_damaged]
    if not current:
        return []
    kept = {facts.id for facts in every if facts.is_pinned or facts.is_damaged} | set(protected)
    for keeper in (_last, _every_steps, _best, _stable, _safe):
        kept.update(facts.id for facts in keeper(current, policy))
    reason = _reason(policy)
    return [
        (facts.id, reason if facts.is_current else "abandoned: training went on from an older checkpoint")
        for facts in every
        if facts.id not in kept
    ]


def _last(current: list[CheckpointFacts], policy: Policy) -> list[CheckpointFacts]:
    return current if policy.keep_last is None else current[-policy.keep_last :]


def _every_steps(current: list[CheckpointFacts], policy: Policy) -> Iterator[CheckpointFacts]:
    """Yield the first at or after each multiple: saves by time hit none exactly."""
    if policy.keep_every_steps is None:
        return
    reached = 0
    for facts in current:
        multiple = facts.id.step // policy.keep_every_steps
        if multiple > reached:
            yield facts
        reached = max(reached, multiple)


def _best(current: list[CheckpointFacts], policy: Policy) -> list[CheckpointFacts]:
    known = [(facts.loss, facts) for facts in reversed(current) if facts.loss is not None and facts.loss == facts.loss]
    known.sort(key=lambda pair: pair[0])  # of equal ones the newer
    return [facts for _, facts in known[: policy.keep_best]]


def _stable(current: list[CheckpointFacts], policy: Policy) -> list[CheckpointFacts]:
    return [facts for facts in current if facts.is_stable][-policy.keep_stable :]


def _safe(current: list[CheckpointFacts], _: Policy) -> Iterator[CheckpointFacts]:
    yield current[-1]
    # What is newer may turn out damaged when it is read for the first time.
    yield from [facts for facts in current if facts.is_verified][-1:]
    # Without it, probation longer than what the other rules span would let nothing become STABLE.
    stable_until = max((facts.id for facts in current if facts.is_stable), default=CheckpointId(0, 0))
    yield from [facts for facts in current if facts.is_candidate and facts.id > stable_until][:1]


def _reason(policy: Policy) -> str:
    parts = [f"not among the last {policy.keep_last}"]
    if policy.keep_every_steps is not None:
        parts.append(f"not the first at a multiple of {policy.keep_every_steps} steps")
    if policy.keep_best:
        parts.append(f"not among the best {policy.keep_best} by loss")
    parts += [f"not among the newest {policy.keep_stable} STABLE", "not pinned"]
    return ", ".join(parts)
