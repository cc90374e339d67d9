"""Attempts: one stretch of training under one control state, and the records that say where each began.

Nobody issues the number: rank 0 claims it by creating the record, and of several claims exactly one succeeds.
Attempt 0 is the seed (the state that the job was initialised with); the first record is number 1.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Literal

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from surefoot.checkpoint.ids import CheckpointId, parse_folder_name
from surefoot.checkpoint.store import Store
from surefoot.errors import AttemptError, AttemptTaken
from surefoot.parsing import parse_json

ATTEMPTS_FOLDER = "attempts"
RESERVE_KEY = "reserve.bin"
"""Freed when the disk is full, so that the record of an attempt can still be written."""
RESERVE_BYTES = 64 * 1024
RESTART_CAUSE_PREFIX = "restart: "
"""Begins the cause of each attempt that a failure began, so that failures can be counted from attempt records."""
IMPORT_CAUSE_PREFIX = "imported from "
"""Begins the cause of an attempt that stands for an imported checkpoint: the job has progress from its first record."""

_FILE_NAME = re.compile(r"(\d{6,})\.json", re.ASCII)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Source(StrEnum):
    """Where the state that an attempt began with was read."""

    SEED = "SEED"
    STAGED = "STAGED"
    COMMITTED = "COMMITTED"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StartsFrom(_Record):
    """The state that an attempt begins with."""

    attempt: int = Field(ge=0)
    step: int = Field(ge=0)
    source: Source

    @model_validator(mode="after")
    def _seed_is_attempt_0(self) -> StartsFrom:
        if (self.source is Source.SEED) != (self.attempt == 0) or (self.attempt == 0 and self.step != 0):
            raise ValueError("source SEED, attempt 0 and step 0 go together")
        return self

    @property
    def checkpoint_id(self) -> CheckpointId:
        """The state as (attempt, step)."""
        return CheckpointId(self.attempt, self.step)


class SkipWindow(_Record):
    """Batch positions `start <= position < stop` that are never trained on."""

    start: int = Field(ge=0)
    stop: int

    @model_validator(mode="after")
    def _not_empty(self) -> SkipWindow:
        if self.stop <= self.start:
            raise ValueError("stop must be greater than start")
        return self


class AttemptRecord(_Record):
    """`attempts/000003.json`: how attempt 3 began. Never changed once written."""

    version: Literal[1] = 1
    attempt: int = Field(ge=1)
    starts_from: StartsFrom
    lr_factor: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Absolute: the learning rate is the schedule's times this; see `lr_factor_at` for how long."""
    lr_hold_steps: int | None = Field(None, ge=0)
    """Steps with that factor from `lr_from_step` on; null: for ever."""
    lr_rewarm_steps: int = Field(0, ge=0)
    """Steps over which the factor then returns linearly to 1."""
    lr_from_step: int = Field(0, ge=0)
    """Step that the attempt which set the factor began at; a restart keeps it, so that nothing is held twice."""
    command: int = Field(0, ge=0)
    """Number of the newest command that began an attempt; ranks ignore it and lower ones from now on."""
    skip_windows: tuple[SkipWindow, ...] = ()
    """All that hold from now on, not only the new ones."""
    cause: str
    world_size: int = Field(ge=1)
    host: str
    started_at: AwareDatetime

    @field_validator("started_at")
    @classmethod
    def _in_utc(cls, value: datetime) -> datetime:
        return value.astimezone(UTC)

    @model_validator(mode="after")
    def _starts_from_an_earlier_one(self) -> AttemptRecord:
        if self.starts_from.attempt >= self.attempt:
            raise ValueError("an attempt starts from an earlier one")
        return self

    @property
    def is_restart(self) -> bool:
        """Whether a failure began it, and neither a user nor a command."""
        return self.cause.startswith(RESTART_CAUSE_PREFIX)

    @property
    def is_import(self) -> bool:
        """Whether an import began it, so that a checkpoint belongs to it although it starts from the seed."""
        return self.cause.startswith(IMPORT_CAUSE_PREFIX)

    def lr_factor_at(self, step: int) -> float:
        """Return what the schedule's learning rate is multiplied by in a step (from 1: as `StepCompleted.step`).

        `lr_factor` for `lr_hold_steps` steps after `lr_from_step`, then on a line that reaches 1 after
        `lr_rewarm_steps` more. A step before that range, where training had to go back further, has the factor too.
        """
        if self.lr_hold_steps is None:
            return self.lr_factor
        steps_beyond = step - self.lr_from_step - self.lr_hold_steps
        if steps_beyond <= 0:
            return self.lr_factor
        if steps_beyond >= self.lr_rewarm_steps:
            return 1.0
        return self.lr_factor + (1.0 - self.lr_factor) * (steps_beyond / self.lr_rewarm_steps)


class AttemptLog:
    """The attempt records of one job. One thread at a time.

    Records never change, so a log reads each file once.

    Args:
        store: The job's storage.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[int, AttemptRecord] = {}

    def read_all(self) -> dict[int, AttemptRecord]:
        """Return every record by attempt number, ascending.

        Raises:
            AttemptError: a record cannot be understood; names the file. Without it the lineage is not known.
        """
        return {number: self._record(number) for number in self._numbers()}

    def newest(self) -> AttemptRecord | None:
        """Return the record with the highest number, None before the first attempt. Costs a folder listing.

        Raises:
            AttemptError: that record cannot be understood; names the file.
        """
        numbers = self._numbers()
        return self._record(numbers[-1]) if numbers else None

    def recent(self, window_seconds: float, now: datetime) -> int:
        """Return how many attempts began in the last `window_seconds` (for the restart budget).

        A record from a clock that runs ahead counts as recent.
        """
        since = now - timedelta(seconds=window_seconds)
        return sum(record.started_at > since for record in self.read_all().values())

    def claim(
        self,
        *,
        after: int,
        starts_from: StartsFrom,
        lr_factor: float = 1.0,
        lr_hold_steps: int | None = None,
        lr_rewarm_steps: int = 0,
        lr_from_step: int = 0,
        command: int = 0,
        skip_windows: tuple[SkipWindow, ...] = (),
        cause: str,
        world_size: int,
        host: str,
        started_at: datetime,
    ) -> AttemptRecord:
        """Claim attempt `after + 1`, durable on return. Rank 0 does so once it verified what to start from.

        The first one where records were lost gets a higher number than any checkpoint that is still there: what is left
        of the attempts before must never count as its own.

        Args:
            after: The newest attempt that the choice of `starts_from` was based on; 0 for none.
            starts_from: Where the attempt begins.
            lr_factor: See `AttemptRecord`.
            lr_hold_steps: See `AttemptRecord`.
            lr_rewarm_steps: See `AttemptRecord`.
            lr_from_step: See `AttemptRecord`.
            command: See `AttemptRecord`.
            skip_windows: See `AttemptRecord`.
            cause: Why there is a new attempt, for people.
            world_size: Number of ranks.
            host: Name of the claiming host.
            started_at: Now, with a time zone.

        Raises:
            AttemptTaken: there is a newer attempt than `after`; choose again.
            OSError: the disk fails. Only reading again tells whether the record is there.
        """
        newest = max(self._numbers(), default=0)
        if newest < after:
            raise AttemptError(f"attempt {after + 1} claimed after attempt {after}, but the newest record is {newest}")
        record = AttemptRecord(
            attempt=1 + max(after, self._newest_in_folders() if after == 0 else 0),
            starts_from=starts_from,
            lr_factor=lr_factor,
            lr_hold_steps=lr_hold_steps,
            lr_rewarm_steps=lr_rewarm_steps,
            lr_from_step=lr_from_step,
            command=command,
            skip_windows=skip_windows,
            cause=cause,
            world_size=world_size,
            host=host,
            started_at=started_at,
        )
        if newest > after:
            raise _taken(record)
        try:
            self._write(record)
        except FileExistsError:
            raise _taken(record) from None
        self._known[record.attempt] = record
        with suppress(OSError):  # on a full disk the drain, or the next claim, tries again
            self.keep_reserve()
        return record

    def keep_reserve(self) -> None:
        """Make sure that a full disk can still take a record. Also called by the drain before it fills the disk.

        Raises:
            OSError: there is no room for the reserve, so there is none for anything else either.
        """
        if RESERVE_KEY not in self._store.list(""):
            # Random, so that no file system compresses it away.
            self._store.write(RESERVE_KEY, [os.urandom(RESERVE_BYTES)])

    def folders(self) -> dict[str, CheckpointId]:
        """Return what is named like a checkpoint by its key, here, in quarantine/ or in trash/, whatever is in it."""
        keys = [f"{parent}{name}" for parent in ("", "quarantine/", "trash/") for name in self._store.list(parent[:-1])]
        # The drain calls a second one of the same name `<name>-2`.
        named = {key: parse_folder_name("-".join(key.rpartition("/")[2].split("-")[:3])) for key in keys}
        return {key: id_ for key, id_ in named.items() if id_ is not None}

    def _newest_in_folders(self) -> int:
        """Return the highest attempt of a committed checkpoint that is there."""
        committed = (id_.attempt for key, id_ in self.folders().items() if "manifest.json" in self._store.list(key))
        return max(committed, default=0)

    def _write(self, record: AttemptRecord) -> None:
        content = record.model_dump_json(indent=1).encode() + b"\n"
        key = _key(record.attempt)
        try:
            self._store.write(key, [content], if_absent=True)
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            self._store.delete(RESERVE_KEY)
            self._store.write(key, [content], if_absent=True)

    def _numbers(self) -> list[int]:
        names = [name for name in self._store.list(ATTEMPTS_FOLDER) if name.endswith(".json")]
        return sorted(self._number(name) for name in names)

    def _number(self, name: str) -> int:
        match = _FILE_NAME.fullmatch(name)
        if match is None or _key(int(match[1])) != f"{ATTEMPTS_FOLDER}/{name}":
            raise AttemptError(f"{self._store}/{ATTEMPTS_FOLDER}/{name}: not the name of an attempt record")
        return int(match[1])

    def _record(self, number: int) -> AttemptRecord:
        if number not in self._known:
            self._known[number] = self._read(number)
        return self._known[number]

    def _read(self, number: int) -> AttemptRecord:
        path = f"{self._store}/{_key(number)}"
        with self._store.read(_key(number)) as file:
            data = file.readall()
        try:
            record = AttemptRecord.model_validate(parse_json(data))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            raise AttemptError(f"{path}: damaged attempt record: {field}: {first['msg']}") from None
        except ValueError as error:
            raise AttemptError(f"{path}: damaged attempt record ({len(data)} bytes), not JSON: {error}") from None
        if record.attempt != number:
            raise AttemptError(f"{path}: damaged attempt record: says it is attempt {record.attempt}")
        return record


def _key(number: int) -> str:
    return f"{ATTEMPTS_FOLDER}/{number:06d}.json"


def _taken(record: AttemptRecord) -> AttemptTaken:
    return AttemptTaken(f"attempt {record.attempt} was claimed by somebody else; read the records and choose again")
