from __future__ import annotations

from typing import ClassVar

from surefoot.events.base import Event


class CheckpointStaged(Event):
    """A snapshot marked `persist` is complete in this rank's staging memory."""

    type: ClassVar[str] = "CheckpointStaged"

    step: int
    num_bytes: int
    copy_seconds: float


class SnapshotSkipped(Event):
    """A snapshot was not taken because no buffer was free; training went on."""

    type: ClassVar[str] = "SnapshotSkipped"

    step: int
    persist: bool
    reason: str
    skipped_total: int


class CheckpointCommitted(Event):
    """manifest.json is on storage: the checkpoint exists."""

    type: ClassVar[str] = "CheckpointCommitted"

    step: int
    world_size: int
    num_bytes: int
    write_seconds: float
    staged_age_seconds: float | None = None
    """From the end of the snapshot to durable."""


class CheckpointQuarantined(Event):
    """A committed checkpoint was found damaged and moved to quarantine/."""

    type: ClassVar[str] = "CheckpointQuarantined"

    step: int
    file: str
    reason: str
    moved_to: str


class RestoreFellBack(Event):
    """A newer source could not be used at start; the next one was tried."""

    type: ClassVar[str] = "RestoreFellBack"

    source: str
    candidate_attempt: int
    candidate_step: int
    reason: str


class CheckpointVerified(Event):
    """Every byte of a committed checkpoint was read back and compared with its checksum."""

    type: ClassVar[str] = "CheckpointVerified"

    step: int
    problem: str | None = None
    """None: it is good."""
    seconds: float


class CheckpointPromoted(Event):
    """A committed checkpoint became STABLE: probation is over and all its floating tensors are finite."""

    type: ClassVar[str] = "CheckpointPromoted"

    step: int
    cleared_through_step: int
