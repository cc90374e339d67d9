"""Whether ranks may be started again after a failure. Pure: data in, data out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from surefoot.errors import EXIT_USAGE
from surefoot.progress import Phase, Progress
from surefoot_worker.launcher.failure import Failure

NEVER_RETRIED = frozenset({"ImportError", "SyntaxError", "UsageError", "NoUsableCheckpoint", "Superseded"})
"""Exception types, or bases of them, that the next start could only meet again."""

_RANDOM = tuple(
    re.compile(pattern)
    for pattern in (
        r"0x[0-9a-fA-F]+",  # an address
        r"\.tmp-[^\s'\"/:,)]*",  # our temporary files
        r"\btmp[a-z0-9_]{8}\b",  # those of Python's tempfile
        r"(?<![0-9A-Za-z])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?![0-9A-Za-z])",  # a UUID
        r"(?<![0-9A-Za-z])(?=[a-f]*[0-9])[0-9a-f]{8,}(?![0-9A-Za-z])",  # a hash or another hexadecimal id
        r"(?<=\bpid )\d+",
    )
)
"""What differs in the message of one and the same error from process to process."""

Signature = tuple[str, str, int | None]


@dataclass(frozen=True)
class History:
    """What happened so far.

    Args:
        restarted_at: Times of the restarts, UTC seconds, ascending.
        seen: The errors so far: type, message, step.
    """

    restarted_at: tuple[float, ...] = ()
    seen: frozenset[Signature] = field(default_factory=frozenset)


class Verdict(NamedTuple):
    """Whether to restart; `reason` says why not, and is empty otherwise."""

    restart: bool
    reason: str
    history: History


def decide(failure: Failure, history: History, *, max_restarts: int, window_seconds: float, now: float) -> Verdict:
    """Judge one failure.

    Args:
        failure: Of the rank that failed first.
        history: From the verdict before.
        max_restarts: As many restarts are allowed in the window.
        window_seconds: Its length.
        now: UTC seconds.

    Returns:
        The verdict, with the history to pass in next time.
    """
    signature = _signature(failure)
    if failure.exit_code == EXIT_USAGE or NEVER_RETRIED.intersection(failure.error_bases):
        return Verdict(restart=False, reason="it would fail in the same way again", history=history)
    if signature is not None and signature in history.seen:
        return Verdict(restart=False, reason=f"the same error came twice {_at(failure.step)}", history=history)
    verdict = spend(history, max_restarts=max_restarts, window_seconds=window_seconds, now=now)
    if not verdict.restart or signature is None:
        return verdict
    return verdict._replace(history=replace(verdict.history, seen=history.seen | {signature}))


def spend(history: History, *, max_restarts: int, window_seconds: float, now: float) -> Verdict:
    """Judge by the budget alone: for a start of the ranks that came to nothing. Arguments as of `decide`.

    A restart that seems to come later than now, because the clock was set back, counts as made now: else it would
    count until the clock has caught up.
    """
    made = (min(moment, now) for moment in history.restarted_at)
    recent = tuple(moment for moment in made if moment > now - window_seconds)
    kept = replace(history, restarted_at=recent)
    if len(recent) >= max_restarts:
        reason = f"{len(recent)} restarts in {window_seconds:g} s used up the budget (restart.max_restarts)"
        return Verdict(restart=False, reason=reason, history=kept)
    return Verdict(restart=True, reason="", history=replace(kept, restarted_at=(*recent, now)))


def progress_ignored(ranks: Mapping[int, Progress | None], *, had_progress: bool) -> str | None:
    """Judge the end of a job whose ranks all ended with status 0: say what is wrong with it, None if nothing is.

    A script that does not go on from where the job was may have trained for days, and nothing of it is kept (case R8).

    Args:
        ranks: Where each rank was when it ended; None: it never attached.
        had_progress: Whether there was something to go on from.
    """
    if not had_progress:
        return None
    advice = "; go on from it with `for batch in session`, give the job another name, or start over with --from-seed"
    if not any(ranks.values()):
        return f"every rank finished, but none called surefoot.sdk.attach although the job had progress{advice}"
    for rank, page in ranks.items():
        if page is not None and page.phase is Phase.START and page.step == page.start_step > 0:
            what = "ended without taking a batch from its session or closing it"
            return f"rank {rank} loaded step {page.step} and {what}{advice}"
    return None


def _signature(failure: Failure) -> Signature | None:
    if failure.hang is not None:
        return ("hang", failure.hang.phase, failure.step)
    if failure.error_type is None:
        return None  # killed by a signal: says nothing about the program
    message = failure.error_message or ""
    for pattern in _RANDOM:
        message = pattern.sub("?", message)
    return (failure.error_type, message, failure.step)


def _at(step: int | None) -> str:
    return "before the first step was known" if step is None else f"at step {step}"
