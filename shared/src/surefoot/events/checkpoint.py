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
    loss: float | None = None
    """Mean training loss of the last steps before it; null: not known."""


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


class CheckpointPruned(Event):
    """Retention removed a checkpoint from storage."""

    type: ClassVar[str] = "CheckpointPruned"

    step: int
    num_bytes: int
    reason: str
    """Why nothing kept it."""


class StorageFailed(Event):
    """Storage failed the drain, as a rule a write; it is tried again, training goes on, what is staged stays there."""

    type: ClassVar[str] = "StorageFailed"

    operation: str
    """What was to be done, e.g. `write step-000000120-a0003/rank-00000.safetensors`."""
    reason: str
    """Name of the errno and what the system says about it."""
    num_failures: int
    """In a row, this one included."""


class StorageRecovered(Event):
    """Storage takes writes again."""

    type: ClassVar[str] = "StorageRecovered"

    seconds: float
    """Since the first failure."""
    num_failures: int


class SaveIntervalChosen(Event):
    """`save_every_seconds: auto` settled on another interval."""

    type: ClassVar[str] = "SaveIntervalChosen"

    step: int
    interval_seconds: float
    save_cost_seconds: float
    """Training time that one save costs: the copy, and slower steps while it is written."""
    mean_seconds_between_failures: float
    num_failures: int
    reason: str
    """One sentence with the numbers."""
