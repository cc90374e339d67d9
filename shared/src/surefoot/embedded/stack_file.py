"""`.surefoot/run/stack.json`: how the stack is and where its services listen. The supervisor writes, all may read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from surefoot.checkpoint.locks import holder_pid
from surefoot.embedded.layout import Layout
from surefoot.small_files import write_atomically


class StackState(StrEnum):
    """STARTING -> RUNNING -> STOPPING -> STOPPED, or STARTING -> FAILED."""

    STARTING = "starting"
    RUNNING = "running"
    """Every service was ready once; from here on those that end are restarted for ever."""
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    """A service did not get ready; everything was stopped again."""


class ServiceState(StrEnum):
    """WAITING -> STARTING -> READY -> (ended) BACKING_OFF -> STARTING; DONE for what is to end; STOPPED at the end."""

    WAITING = "waiting"
    """Others must be ready first."""
    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing off"
    """It ended and is started again in a moment."""
    DONE = "done"
    STOPPED = "stopped"


@dataclass
class ServiceStatus:
    """What the supervisor knows of a service.

    Attributes:
        pid: 0: it is not running.
        restarts: How often it was started again.
        since_seconds: CLOCK_MONOTONIC since when it is in this state.
        detail: How it ended last, or what it waits for; may be empty.
    """

    state: ServiceState = ServiceState.WAITING
    pid: Annotated[int, Field(ge=0)] = 0
    restarts: Annotated[int, Field(ge=0)] = 0
    since_seconds: float = 0.0
    detail: str = ""


@dataclass
class Stack:
    """The content of the file.

    Attributes:
        pid: Of the supervisor.
        home: Absolute.
        urls: By service: `api`, `gateway`, `redis`, `database`.
        token_file: Holds what clients of the api send as Bearer token; None: no token is asked for.
        services: In the order in which they are started.
        failed: Services that did not get ready, or did not end in good order.
        detail: How each of them ended.
    """

    pid: Annotated[int, Field(gt=0)]
    home: str
    urls: dict[str, str]
    token_file: str | None = None
    state: StackState = StackState.STARTING
    services: dict[str, ServiceStatus] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    detail: str = ""

    @property
    def token(self) -> str | None:
        """The token for the api, None when none is asked for."""
        return Path(self.token_file).read_text(encoding="ascii").strip() if self.token_file else None

    def write(self) -> None:
        """Replace the file; readers see the old or the new one."""
        write_atomically(Layout(Path(self.home)).stack_file, json.dumps(asdict(self), indent=2))


_STACK = TypeAdapter(Stack)


def read_stack(home: Path) -> Stack | None:
    """Return what the supervisor wrote last; None: no stack was ever started there. It may have ended since.

    A file that is none of the supervisor's is as if there were none.
    """
    try:
        return _STACK.validate_json(Layout(home).stack_file.read_bytes(), strict=True)
    except (OSError, ValueError):  # pydantic's ValidationError is one
        return None


def supervisor_pid(home: Path) -> int | None:
    """Return the process that supervises the stack now; None: nobody does. The kernel knows, whatever files say."""
    return holder_pid(Layout(home).lock_file)


def running_stack(home: Path) -> Stack | None:
    """Return the stack of a home folder if its supervisor is alive: where clients look for the api."""
    stack = read_stack(home)
    return stack if stack is not None and supervisor_pid(home) == stack.pid else None
