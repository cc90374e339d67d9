"""How a rank failed: written by the rank when an exception leaves the user's program, read by the launcher."""

from __future__ import annotations

import json
import re
import signal
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from surefoot.errors import EXIT_FAILED, SurefootError

if TYPE_CHECKING:  # ranks import this module, and have no use for that one
    from surefoot_worker.launcher.hang import Hang

LEFT_EARLY = "LeftEarly"
"""Stands for the type of an exception where a rank ended with status 0 and the others wait for it."""
_LOST_CONNECTION = re.compile(r"connection (closed|reset|refused)|closed by peer|broken pipe|socket", re.IGNORECASE)


@dataclass(frozen=True)
class ErrorReport:
    """The exception that ended a rank.

    Args:
        error_type: Name of its class.
        error_bases: Names of its class and of all bases.
        error_message: Its text.
        traceback: Formatted, without the frames of the launcher.
        exit_code: What the rank exits with.
        monotonic_seconds: CLOCK_MONOTONIC of when it was caught.
    """

    error_type: str
    error_bases: tuple[str, ...]
    error_message: str
    traceback: str
    exit_code: int
    monotonic_seconds: float


@dataclass(frozen=True)
class Failure:
    """How the process of a rank ended, with what is known about why.

    Args:
        rank: Global rank.
        pid: Process id.
        exit_code: Negative: the signal that ended it.
        attempt: Which it trained in; None before one was claimed.
        step: Last step it completed; None when it never said.
        report: Its exception, if it had one.
        hang: How long it stood still; None when it ended by itself.
    """

    rank: int
    pid: int
    exit_code: int
    attempt: int | None = None
    step: int | None = None
    report: ErrorReport | None = None
    hang: Hang | None = None

    @property
    def error_type(self) -> str | None:
        """Name of the exception's class, None without one."""
        return self.report.error_type if self.report else None

    @property
    def error_message(self) -> str | None:
        """Text of the exception, None without one."""
        return self.report.error_message if self.report else None

    @property
    def error_bases(self) -> tuple[str, ...]:
        """Names of the exception's class and its bases."""
        return self.report.error_bases if self.report else ()

    def summary(self) -> str:
        """Say in one line what happened."""
        at = "" if self.step is None else f" after step {self.step}"
        if self.hang is not None:
            limit = f"no progress for {self.hang.seconds:.0f} s, allowed are {self.hang.limit_seconds:.0f} s"
            return f"rank {self.rank} hung in phase {self.hang.phase}{at}: {limit}"
        if self.error_type == LEFT_EARLY:
            return f"rank {self.rank} left its loop{at} and ended, while other ranks went on"
        if self.report is not None and self.report.error_type != "SystemExit":
            first_line = self.report.error_message.partition("\n")[0]
            return f"rank {self.rank} raised {self.report.error_type}: {first_line}{at}"
        if self.exit_code < 0:
            return f"rank {self.rank} was killed by {signal_name(-self.exit_code)}{at}"
        return f"rank {self.rank} exited with status {self.exit_code}{at}"


class RankExit(NamedTuple):
    """A process that ended by itself: not by the launcher."""

    rank: int
    exit_code: int
    report: ErrorReport | None


def write_report(path: Path, error: BaseException, skip_files: frozenset[str]) -> ErrorReport:
    """Write what ended this rank; called by the rank before anything is torn down.

    Args:
        path: The rank's failure file.
        error: What left the user's program.
        skip_files: Source files whose frames are ours and not the user's.
    """
    frames = _user_frames(error.__traceback__, skip_files)
    report = ErrorReport(
        error_type=type(error).__name__,
        error_bases=tuple(cls.__name__ for cls in type(error).__mro__),
        error_message=str(error),
        traceback="".join(traceback.format_exception(type(error), error, frames)),
        exit_code=_exit_code(error),
        monotonic_seconds=time.monotonic(),
    )
    with suppress(OSError):  # no memory left for it: the exit code still tells, and the traceback is in the log
        path.write_text(json.dumps(asdict(report)), encoding="utf-8")
    return report


def read_report(path: Path) -> ErrorReport | None:
    """Return what the rank wrote, None when it wrote nothing or was killed while writing."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return ErrorReport(**(data | {"error_bases": tuple(data["error_bases"])}))


def first_of(exits: Iterable[RankExit]) -> RankExit:
    """Return the exit that caused the others.

    A death without a report (a signal, os._exit) comes before exceptions: the other ranks' "connection closed by
    peer" are its echo. Among exceptions the earliest is the cause.
    """
    return min(exits, key=lambda ended: ended.report.monotonic_seconds if ended.report else -1.0)


def left_early(echo: ErrorReport) -> ErrorReport | None:
    """Return what a rank that ended with status 0 did to another one, if that one's exception looks like it.

    Args:
        echo: The exception of the other rank.
    """
    if not _LOST_CONNECTION.search(echo.error_message):
        return None
    message = "ended with status 0 while other ranks went on"
    return ErrorReport(LEFT_EARLY, (), message, echo.traceback, 0, echo.monotonic_seconds)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else EXIT_FAILED
    return error.exit_code if isinstance(error, SurefootError) else EXIT_FAILED


def _user_frames(frames: TracebackType | None, skip_files: frozenset[str]) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename in skip_files:
        frames = frames.tb_next
    return frames


def signal_name(number: int) -> str:
    """Return how people write a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
