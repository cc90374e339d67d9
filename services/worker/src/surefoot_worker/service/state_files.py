"""Small JSON files in which the worker keeps how far it is. A reader trusts nothing that stands in them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import structlog
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from surefoot.small_files import write_atomically

StateT = TypeVar("StateT", bound="StateFile")
Count = Annotated[int, Field(ge=0, lt=2**63)]
Place = tuple[Count, Count]
"""Byte and line up to which a file has been read."""

log = structlog.get_logger(__name__)


class StateFile(BaseModel):
    """What such a file holds. Its defaults stand for a file that is not there."""

    model_config = ConfigDict(strict=True, frozen=True)


class Forwarded(StateFile):
    """`forwarded.json`: how far the pump is.

    Attributes:
        events: Id of the event file, and the place in it.
        output: By name of the file; None: only what is written from now on.
    """

    events: tuple[str, Count, Count] = ("", 0, 0)
    output: dict[str, Place] | None = None


class Delivered(StateFile):
    """`delivered.json`: the last command that is in the staging folder.

    Attributes:
        after: Id of its stream entry; `0`: none is.
    """

    after: Annotated[str, StringConstraints(pattern=r"^[0-9]{1,20}(-[0-9]{1,20})?$")] = "0"


def read_state(path: Path, kind: type[StateT]) -> StateT:
    """Return what `write_state` wrote; the defaults where there is no file, and where its content cannot be used.

    The latter is logged, once per call. Any thread.
    """
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return kind()
    except (OSError, ValueError) as error:  # pydantic's ValidationError is one
        log.warning("a state file cannot be used; all is begun anew", file=str(path), error=str(error))
        return kind()


def write_state(path: Path, state: StateFile) -> None:
    """Replace the file; a reader sees the old or the new one. Any thread.

    Raises:
        OSError: it cannot be written.
    """
    write_atomically(path, state.model_dump_json())


def place_within(path: Path, offset: int, line: int) -> Place:
    """Return a place, or the beginning where the file cannot have it: it is shorter, or has fewer bytes than lines."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        size = 0
    return (offset, line) if line <= offset <= size else (0, 0)
