"""Commands on their way to the ranks of one host: files in the job's staging folder.

    <staging folder>/commands/000000000017.json      one line of `encode_message`

The worker service writes them; rank 0 looks for them once per step (one `stat`) and never waits. Files are complete
when they appear, are never changed, and go with the staging folder: nothing of them outlives the job.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import structlog

from surefoot.events.base import Command
from surefoot.events.registry import decode_message, encode_message

COMMANDS_FOLDER = "commands"

_FILE_NAME = re.compile(r"(\d{12,})\.json", re.ASCII)
_SETTLED_NANOSECONDS = 1_000_000_000

_TOO_LOW = re.compile(r"number \d+ is not above (\d+)", re.ASCII)

log = structlog.get_logger(__name__)


def too_low(number: int, newest: int) -> str:
    """Return the ranks' reason for refusing a command of the present attempt for its number alone."""
    return f"number {number} is not above {newest}"


def newest_if_too_low(reason: str) -> int | None:
    """Return the number that a refusal asks to exceed; None: it has another reason."""
    match = _TOO_LOW.fullmatch(reason)
    return None if match is None else int(match[1])


def write_command(folder: Path, command: Command) -> Path:
    """Put a command where rank 0 finds it. Any process; the same command twice is one file.

    Args:
        folder: The job's staging folder.
        command: What to do. Its number orders it among the others.

    Returns:
        The file.

    Raises:
        FileNotFoundError: the staging folder is not there, so no rank runs on this host.
        OSError: the file cannot be written.
    """
    commands = folder / COMMANDS_FOLDER
    commands.mkdir(mode=0o700, exist_ok=True)
    path = commands / f"{command.number:012d}.json"
    temporary = commands / f"{path.name}.{os.urandom(6).hex()}.tmp"
    try:
        temporary.write_text(encode_message(command) + "\n", encoding="utf-8")
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


class CommandFolder:
    """Rank 0's view of the commands. One thread.

    Args:
        folder: The job's staging folder.
        job: Name of the job; a command for another one is left alone.
    """

    def __init__(self, folder: Path, job: str) -> None:
        self._path = folder / COMMANDS_FOLDER
        self._job = job
        self._changed_at: int | None = None
        self._inodes: dict[int, int] = {}
        self._bad: set[int] = set()
        self._given: dict[int, Command] = {}
        self._looked_at: dict[int, int] = {}

    def next_after(self, number: int) -> Command | None:
        """Return the command with the lowest number above `number`; None: there is none.

        Costs one `stat` while nothing has changed. A file that is no command for this job is logged once and passed
        over: whoever ordered it gets no answer and must decide anew.
        """
        self._look()
        for candidate in self._inodes:
            if candidate > number and candidate not in self._bad:
                command = self._read(candidate)
                if command is not None:
                    self._given[candidate] = command
                    return command
                self._bad.add(candidate)
        return None

    def too_low(self, number: int) -> list[Command]:
        """Return the commands at or below `number` that were never given out, each once, as of the last `next_after`.

        A file that was replaced by another command of its number counts as new; by the same command, it does not.
        """
        found = []
        for candidate, inode in self._inodes.items():
            if candidate <= number and self._looked_at.get(candidate) != inode and candidate not in self._bad:
                self._looked_at[candidate] = inode
                command = self._read(candidate)
                if command is not None and command != self._given.get(candidate):
                    self._given[candidate] = command
                    found.append(command)
        return found

    def _look(self) -> None:
        try:
            changed_at = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            self._changed_at, self._inodes = None, {}
            return
        if changed_at == self._changed_at:
            return
        self._inodes = dict(sorted(self._list()))
        # File times tick every few milliseconds: a folder changed just now may change again without showing it.
        settled = time.time_ns() - changed_at > _SETTLED_NANOSECONDS
        self._changed_at = changed_at if settled else None

    def _list(self) -> Iterator[tuple[int, int]]:
        """Return the numbers and inodes of what may be commands."""
        try:
            entries = os.scandir(self._path)
        except FileNotFoundError:
            return
        with entries:
            for entry in entries:
                match = _FILE_NAME.fullmatch(entry.name)
                if match is not None:
                    yield int(match[1]), entry.inode()

    def _read(self, number: int) -> Command | None:
        path = self._path / f"{number:012d}.json"
        try:
            message = decode_message(path.read_bytes())
        except (OSError, ValueError) as error:
            log.error("a command cannot be read", path=str(path), error=str(error))
            return None
        if not isinstance(message, Command) or message.number != number or message.job != self._job:
            log.error("a file among the commands is no command of this job", path=str(path))
            return None
        return message
