"""Stacks of stand-ins (see `stand_in`), and the promise that nothing of them is left when a test ends."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from helpers.waiting import wait_until
from surefoot.embedded.layout import Layout
from surefoot.embedded.plan import Plan, Readiness, Service
from surefoot.embedded.stack_file import supervisor_pid

STAND_IN = Path(__file__).with_name("stand_in.py")


def stand_in(name: str, mode: str = "well", *, after: tuple[str, ...] = (), stop_seconds: float = 10.0) -> Service:
    return Service(name, (sys.executable, str(STAND_IN), name, mode), after=after, stop_seconds=stop_seconds)


def shell(name: str, script: str = "exec sleep 1000", **options: Any) -> Service:
    """Return a service that costs no interpreter: it is ready as soon as it is alive."""
    command = ("sh", "-c", f'echo "{name} start" >> "$SUREFOOT_HOME/story.txt"; {script}')
    return Service(name, command, options.pop("ready", Readiness.ALIVE), **options)


def make_plan(home: Path, *services: Service, start_seconds: float = 30.0) -> Plan:
    return Plan(str(home), services, environment={"SUREFOOT_HOME": str(home)}, start_seconds=start_seconds)


def story(home: Path) -> list[str]:
    path = home / "story.txt"
    return path.read_text().splitlines() if path.exists() else []


def processes_of(home: Path) -> list[int]:
    """Return the processes that have this home folder in their environment or command, this one left out."""
    needle = str(home).encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with suppress(OSError):
                seen = (folder / "environ").read_bytes().split(b"\0") + [(folder / "cmdline").read_bytes()]
                if any(needle in part for part in seen):
                    found.append(int(folder.name))
    return found


def kill_stack(home: Path) -> None:
    """SIGKILL the supervisor and wait until all is gone; for the end of a test, however it went."""
    pid = supervisor_pid(home)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not processes_of(home), 20, f"the stack of {home} is gone")


def log_of(home: Path, service: str) -> str:
    return Layout(home).log_file(service).read_text()


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
