"""Every stream and consumer group there is, in one table. Nobody spells a stream's name out anywhere else."""

from __future__ import annotations

from dataclasses import dataclass

HOUR_SECONDS = 3600
DAY_SECONDS = 24 * HOUR_SECONDS

EVENTS = "surefoot:events"
REQUESTS = "surefoot:requests"
DEAD_SUFFIX = ":dead"

CLAIM_IDLE_SECONDS = 60.0
"""A consumer that has not touched an entry for so long is taken for dead, and its entries are taken over."""

_COMMANDS_PREFIX = "surefoot:commands:"
_LOGS_PREFIX = "surefoot:logs:"


@dataclass(frozen=True)
class Stream:
    """One stream, or one per job.

    Attributes:
        name: As on the server; ends with `<job>` when there is one for each job.
        what: What is on it.
        writer: Who appends.
        groups: Consumer groups; each has one consumer at a time, named like the group.
        retention_seconds: Older entries are trimmed.
        max_entries: A bound on memory; reached only when something is wrong.
    """

    name: str
    what: str
    writer: str
    groups: tuple[str, ...]
    retention_seconds: int
    max_entries: int


STREAMS: tuple[Stream, ...] = (
    Stream(EVENTS, "facts about all jobs", "worker, and each service its own facts",
           ("detector", "recovery", "writer"), DAY_SECONDS, 500_000),
    Stream(REQUESTS, "what people asked for", "api", ("recovery",), DAY_SECONDS, 10_000),
    Stream(_COMMANDS_PREFIX + "<job>", "commands for the ranks of one job", "recovery", (), DAY_SECONDS, 10_000),
    Stream(_LOGS_PREFIX + "<job>", "output of the ranks of one job", "worker", (), HOUR_SECONDS, 20_000),
    Stream("<stream>" + DEAD_SUFFIX, "entries that no handler could take, with the problem", "the reader",
           (), 7 * DAY_SECONDS, 10_000),
)  # fmt: skip


def commands_stream(job: str) -> str:
    """Return the name of the stream of commands for a job."""
    return _COMMANDS_PREFIX + job


def logs_stream(job: str) -> str:
    """Return the name of the stream of a job's output."""
    return _LOGS_PREFIX + job


def stream_of(name: str) -> Stream:
    """Return the row of the table that a stream belongs to.

    Raises:
        KeyError: nobody declared it.
    """
    if name.endswith(DEAD_SUFFIX):
        return STREAMS[-1]
    for stream in STREAMS[:-1]:
        prefix, placeholder, _ = stream.name.partition("<")
        if name == prefix or (placeholder and name.startswith(prefix)):
            return stream
    raise KeyError(name)
