"""What recovery orders the ranks to do, and what people ask recovery for. Commands are imperative."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from surefoot.checkpoint.attempts import SkipWindow
from surefoot.events.base import Command, Request


class RollBack(Command):
    """Load a committed checkpoint in process and go on from it as a new attempt."""

    type: ClassVar[str] = "RollBack"

    to_attempt: int = Field(ge=1)
    to_step: int = Field(ge=1)
    lr_factor: float = Field(gt=0, allow_inf_nan=False)
    """Absolute: the learning rate is the schedule's times this, from the first step of the new attempt."""
    lr_hold_steps: int | None = Field(default=None, ge=0)
    """Steps with that factor; null: for ever."""
    lr_rewarm_steps: int = Field(default=0, ge=0)
    """Steps over which the factor then returns linearly to 1."""
    skip_windows: tuple[SkipWindow, ...] = ()
    """Batch positions to leave out from now on, beside those that the attempt leaves out already."""


class SetLearningRate(Command):
    """Go on at once, as a new attempt, with another factor on the schedule's learning rate."""

    type: ClassVar[str] = "SetLearningRate"

    lr_factor: float = Field(gt=0, allow_inf_nan=False)
    lr_hold_steps: int | None = Field(default=None, ge=0)
    lr_rewarm_steps: int = Field(default=0, ge=0)


class SaveCheckpoint(Command):
    """Make the next snapshot durable. Begins no attempt."""

    type: ClassVar[str] = "SaveCheckpoint"


class StopTraining(Command):
    """Save, stop, and stay stopped until a person submits the job again. The worker does it, as for SIGTERM."""

    type: ClassVar[str] = "StopTraining"


class RollBackRequested(Request):
    """Somebody wants to go back: to the newest STABLE checkpoint, or to the one named."""

    type: ClassVar[str] = "RollBackRequested"

    to_attempt: int | None = None
    to_step: int | None = None
    lr_factor: float | None = None
    """None: as it is."""


class SetLearningRateRequested(Request):
    """Somebody wants another learning rate."""

    type: ClassVar[str] = "SetLearningRateRequested"

    lr_factor: float
    lr_hold_steps: int | None = None
    lr_rewarm_steps: int = 0


class SaveRequested(Request):
    """Somebody wants a checkpoint now."""

    type: ClassVar[str] = "SaveRequested"
