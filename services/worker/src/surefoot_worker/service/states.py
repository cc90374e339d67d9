"""Which state of a job may follow which. Pure."""

from __future__ import annotations

from surefoot.events import JobState

_ENDS = frozenset({JobState.SUCCEEDED, JobState.STOPPED, JobState.FAILED})
_LEAVES = _ENDS | {JobState.PENDING, JobState.PAUSED}
"""How a launcher may end: for good, or to go on later."""

TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.PENDING: frozenset({JobState.STARTING, JobState.PAUSED, JobState.STOPPED, JobState.FAILED}),
    JobState.STARTING: _LEAVES | {JobState.RUNNING, JobState.RECOVERING, JobState.STOPPING},
    JobState.RUNNING: _LEAVES | {JobState.DEGRADED, JobState.RECOVERING, JobState.STOPPING},
    JobState.DEGRADED: _LEAVES | {JobState.RUNNING, JobState.RECOVERING, JobState.STOPPING},
    JobState.RECOVERING: _LEAVES | {JobState.RUNNING, JobState.DEGRADED, JobState.STOPPING},
    JobState.STOPPING: _LEAVES,
    JobState.PAUSED: frozenset({JobState.PENDING, JobState.STOPPED}),
    # Submitted again: a new run.
    JobState.SUCCEEDED: frozenset({JobState.PENDING}),
    JobState.STOPPED: frozenset({JobState.PENDING}),
    JobState.FAILED: frozenset({JobState.PENDING}),
}
"""From each state those that may follow it."""

HAS_LAUNCHER = frozenset(
    {JobState.STARTING, JobState.RUNNING, JobState.DEGRADED, JobState.RECOVERING, JobState.STOPPING}
)
"""In these states a launcher runs, or has been lost."""


def may_follow(before: JobState, after: JobState) -> bool:
    """Return whether a job may go from one state to another."""
    return after in TRANSITIONS[before]
