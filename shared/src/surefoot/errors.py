"""Every error that Surefoot raises on purpose, and the exit codes of its commands.

SurefootError
├── UsageError            the caller's input is wrong (exit 2); names the key and what is allowed
│   └── StagingTooSmall   the staging file system cannot hold the buffers
├── CheckpointError
│   ├── DamagedCheckpoint wrong size, wrong checksum or unreadable manifest
│   └── NoUsableCheckpoint the job had progress and nothing of it can be restored
├── AttemptError
│   ├── AttemptTaken      somebody else claimed the attempt number first
│   └── Superseded        a newer attempt exists; this one must not train on
├── Unavailable           something outside does not answer; nothing is wrong with the input: try again
│   ├── BusUnavailable     the Redis-compatible server
│   └── CatalogueUnavailable  the database
└── RanksOutOfStep        ranks disagree about (attempt, step)
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
"""The job failed, or the thing asked for is not there."""
EXIT_USAGE = 2
"""Bad input: nothing was started and nothing was written."""
EXIT_DAMAGED = 3
"""`surefoot verify` found damage."""
EXIT_PREEMPTED = 75
"""Stopped on request with everything saved (BSD's EX_TEMPFAIL: run it again to go on)."""


class SurefootError(Exception):
    """Base of all errors raised on purpose; the message is meant for a person."""

    exit_code = EXIT_FAILED


class UsageError(SurefootError):
    """The caller's input is wrong.

    Args:
        key: The setting that is wrong, as the user wrote it, e.g. `checkpoint.num_buffers`.
        problem: What is wrong with it and what is allowed.
    """

    exit_code = EXIT_USAGE

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key = key
        self.problem = problem


class StagingTooSmall(UsageError):
    """The staging file system cannot hold the buffers."""

    def __init__(self, directory: str, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(
            "checkpoint.staging_dir",
            f"{directory} has {available_bytes / 2**20:,.1f} MiB free but the snapshot buffers need "
            f"{needed_bytes / 2**20:,.1f} MiB; give it more room, point staging_dir at a larger tmpfs, "
            "or lower checkpoint.num_buffers",
        )
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class CheckpointError(SurefootError):
    """A checkpoint cannot be written, read or trusted."""


class DamagedCheckpoint(CheckpointError):
    """A committed checkpoint has a file of the wrong size or checksum, or an unreadable manifest.

    Args:
        path: The file that is damaged.
        reason: What was expected and what was found.
    """

    exit_code = EXIT_DAMAGED

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class NoUsableCheckpoint(CheckpointError):
    """The job had progress, and nothing of it can be restored. It never starts over by itself."""


class AttemptError(SurefootError):
    """An attempt cannot be claimed or may not go on."""


class AttemptTaken(AttemptError):
    """Somebody else claimed the attempt number first; the lineage has changed, choose again."""


class Superseded(AttemptError):
    """A newer attempt exists; this one must not train on."""


class RanksOutOfStep(SurefootError):
    """Ranks disagree about (attempt, step); the message names the odd one."""


class Unavailable(SurefootError):
    """Something outside does not answer; nothing is wrong with what was asked, so it is worth trying again."""


class BusUnavailable(Unavailable):
    """The Redis-compatible server does not answer."""


class CatalogueUnavailable(Unavailable):
    """The database does not answer."""
