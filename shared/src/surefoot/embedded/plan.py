"""What a supervisor is to run, as data: `SERVICES` is the table of Surefoot's own services."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from surefoot.errors import SurefootError

MODULE = (sys.executable, "-P", "-m")
"""Runs a module. -P: what happens to lie in the current folder, the user's redis.py say, is not for services to import.
PYTHONPATH counts as ever."""


class Readiness(StrEnum):
    """How the supervisor sees that a service is ready."""

    ALIVE = "alive"
    """Its process runs."""
    ANSWERS = "answers"
    """It is the Redis-compatible server and answers PING at its `url`."""
    HEALTH = "health"
    """Its health file says so; with a `url`, that answers 200 too."""
    ENDED = "ended"
    """It is no service but a chore, and has ended with exit code 0."""


@dataclass(frozen=True)
class Service:
    """One process.

    Attributes:
        name: Also of its log and its health file.
        command: `{...}` is replaced by the plan's words.
        ready: See `Readiness`.
        after: Services that must be ready before it starts. Those that may start at the same time do.
        outlived_by: Services that are stopped only when it has ended, beside those of `after`.
        url: What must answer before it is ready; empty: nothing.
        stop_seconds: Between SIGTERM and SIGKILL.
    """

    name: str
    command: tuple[str, ...]
    ready: Readiness = Readiness.HEALTH
    after: tuple[str, ...] = ()
    outlived_by: tuple[str, ...] = ()
    url: str = ""
    stop_seconds: float = 15.0


@dataclass(frozen=True)
class Plan:
    """All that a supervisor needs.

    Attributes:
        home: Folder of the stack, absolute.
        services: What to run; `supervisor.stop_order` says how it is stopped.
        urls: For clients, by service.
        environment: Variables for the services beside those of the supervisor.
        token_file: See `Stack`.
        start_seconds: Every service must be ready within this time or the stack is stopped again.
    """

    home: str
    services: tuple[Service, ...]
    urls: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    token_file: str | None = None
    start_seconds: float = 120.0

    def write(self, path: Path) -> None:
        """Write it for `read_plan`; nobody else may read it, as the token is in it."""
        path.touch(mode=0o600)
        path.write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")


_PLAN = TypeAdapter(Plan)


class PlanUnreadable(SurefootError):
    """The file with the plan holds no plan."""


def read_plan(path: Path) -> Plan:
    """Return what `Plan.write` wrote.

    Raises:
        PlanUnreadable: the file is not there, or it holds something else.
    """
    try:
        return _PLAN.validate_json(path.read_bytes(), strict=True)
    except ValidationError:  # its text may hold the token
        raise PlanUnreadable(f"{path} holds no plan of a stack") from None
    except OSError as error:
        raise PlanUnreadable(f"{path} cannot be read: {error.strerror or error}") from None


_BASE = ("server", "database")
_WATCHERS = ("detector", "recovery", "writer", "writer-tasks", "gateway")


def _serve(name: str) -> tuple[str, ...]:
    return (*MODULE, "surefoot.embedded.serve", name)


SERVICES: tuple[Service, ...] = (
    Service("server", ("{server}",), Readiness.ANSWERS, url="{redis_url}"),
    Service("database", (*MODULE, "surefoot.embedded.upgrade", "{database_url}"), Readiness.ENDED),
    Service("detector", _serve("detector"), after=_BASE),
    Service("recovery", _serve("recovery"), after=_BASE),
    # It waits until the drains that have work are done.
    Service("writer", _serve("writer"), after=_BASE, stop_seconds=90),
    Service(
        "writer-tasks",
        # Celery itself puts the current folder in front while it imports the tasks: it shall be one of ours.
        (*MODULE, "celery", "-q", "--workdir", "{home}", "-A", "surefoot_writer.tasks", "worker", "--pool", "solo",
         "--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "WARNING"),
        Readiness.ALIVE,
        after=_BASE,
    ),
    Service("gateway", _serve("gateway"), after=_BASE, url="{gateway_url}/healthz"),
    # It saves the running jobs and waits until they are durable.
    Service("worker", _serve("worker"), after=_BASE, outlived_by=_WATCHERS, stop_seconds=240),
    Service("api", _serve("api"), after=_BASE, outlived_by=("worker",), url="{api_url}/healthz"),
)  # fmt: skip
"""Nothing is lost by what starts late, as streams keep what is on them; so all start at once that need not wait.

`{server}` becomes several words."""


def fill_in(services: tuple[Service, ...], words: dict[str, str], server: tuple[str, ...]) -> tuple[Service, ...]:
    """Return the table with its words replaced.

    Args:
        services: The table.
        words: For `{name}` in commands and URLs.
        server: What `{server}` stands for.
    """
    filled = []
    for service in services:
        command = tuple(
            word for part in service.command for word in (server if part == "{server}" else (part.format(**words),))
        )
        filled.append(replace(service, command=command, url=service.url.format(**words)))
    return tuple(filled)
