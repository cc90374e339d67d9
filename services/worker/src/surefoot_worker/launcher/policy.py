"""Whether ranks may be started again after a failure. Pure: data in, data out."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from surefoot.errors import EXIT_USAGE
from surefoot_worker.launcher.failure import Failure

NEVER_RETRIED = frozenset({"ImportError", "SyntaxError", "UsageError", "NoUsableCheckpoint", "Superseded"})
"""Exception types, or bases of them, that the next start could only meet again."""

RESTART_CAUSE_PREFIX = "restart: "
"""Begins the cause of each attempt that a restart began, so that the budget can be counted from attempt records."""

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
    recent = tuple(moment for moment in history.restarted_at if moment > now - window_seconds)
    signature = _signature(failure)
    reason = ""
    if failure.exit_code == EXIT_USAGE or NEVER_RETRIED.intersection(failure.error_bases):
        reason = "it would fail in the same way again"
    elif signature is not None and signature in history.seen:
        reason = f"the same error came twice {_at(failure.step)}"
    elif len(recent) >= max_restarts:
        reason = f"{len(recent)} restarts in {window_seconds:g} s used up the budget (restart.max_restarts)"
    if reason:
        return Verdict(restart=False, reason=reason, history=history)
    seen = history.seen if signature is None else history.seen | {signature}
    return Verdict(restart=True, reason="", history=replace(history, restarted_at=(*recent, now), seen=seen))


def _signature(failure: Failure) -> Signature | None:
    if failure.error_type is None:
        return None  # killed by a signal: says nothing about the program
    message = re.sub(r"0x[0-9a-fA-F]+", "0x?", failure.error_message or "")
    return (failure.error_type, message, failure.step)


def _at(step: int | None) -> str:
    return "before the first step was known" if step is None else f"at step {step}"
