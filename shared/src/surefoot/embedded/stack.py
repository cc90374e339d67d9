"""Start and stop the stack of a home folder."""

from __future__ import annotations

import os
import secrets
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from surefoot.embedded.layout import Layout
from surefoot.embedded.plan import SERVICES, Plan, fill_in
from surefoot.embedded.ports import LOOPBACK, choose_port
from surefoot.embedded.server import server_arguments, server_command, write_secrets
from surefoot.embedded.stack_file import Stack, StackState, read_stack, supervisor_pid
from surefoot.embedded.supervisor import Supervisor
from surefoot.errors import SurefootError
from surefoot.processes import JOB_KEY_ENVIRONMENT_KEY

STOP_SECONDS = 420.0
"""All of the services' own limits together."""
_POLL_SECONDS = 0.02


class StackFailed(SurefootError):
    """The stack could not be started or stopped."""


@dataclass(frozen=True)
class Ports:
    """What the user asked for; None: any."""

    api: int | None = None
    gateway: int | None = None
    redis: int | None = None


def make_plan(layout: Layout, ports: Ports) -> Plan:
    """Return the plan for Surefoot's own services; makes the folders and the token.

    Raises:
        PortInUse: a port that was asked for is in use.
        NoServer: there is no server binary.
        OSError: a folder cannot be made.
    """
    layout.make()
    last = _last_ports(layout)
    chosen = {
        name: choose_port(f"--{name}-port", wanted, last.get(name))
        for name, wanted in (("redis", ports.redis), ("api", ports.api), ("gateway", ports.gateway))
    }
    urls = {
        "api": f"http://{LOOPBACK}:{chosen['api']}",
        "gateway": f"http://{LOOPBACK}:{chosen['gateway']}",
        "redis": f"redis://{LOOPBACK}:{chosen['redis']}/0",
        "database": f"sqlite:///{layout.database_file}",
    }
    token = _token(layout)
    write_secrets(layout.server_secrets, token)
    server = (*server_command(), *server_arguments(chosen["redis"], layout.db, layout.server_secrets))
    environment = {
        "SUREFOOT_HOME": str(layout.home),
        "SUREFOOT_REDIS_URL": urls["redis"].replace("://", f"://:{quote(token, safe='')}@"),
        "SUREFOOT_DATABASE_URL": urls["database"],
        "SUREFOOT_API_HOST": LOOPBACK,
        "SUREFOOT_API_PORT": str(chosen["api"]),
        "SUREFOOT_API_TOKEN": token,
        "SUREFOOT_GATEWAY_HOST": LOOPBACK,
        "SUREFOOT_GATEWAY_PORT": str(chosen["gateway"]),
    }
    words = {"home": str(layout.home)} | {f"{name}_url": url for name, url in urls.items()}
    services = fill_in(SERVICES, words, server)
    return Plan(str(layout.home), services, urls, environment, str(layout.token_file))


def start(plan: Plan, on_change: Callable[[Stack], None] | None = None) -> Stack:
    """Start a supervisor that outlives this process, and wait until all services are ready.

    Args:
        plan: What it is to run.
        on_change: Called with the stack whenever it has changed.

    Raises:
        StackFailed: a service did not get ready; everything was stopped again.
    """
    layout = Layout(Path(plan.home))
    layout.make()
    # Handed over in a file of its own: another supervisor may be at work, which goes by plan.json.
    plan_file = layout.plan_file.with_suffix(f".{os.getpid()}.tmp")
    plan.write(plan_file)
    pid = _start_supervisor(layout, plan_file)
    try:
        return _wait_until_running(layout, pid, on_change)
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        raise


def run_in_foreground(plan: Plan, on_change: Callable[[Stack], None] | None = None) -> int:
    """Supervise in this process until SIGINT or SIGTERM; return the exit code.

    Raises:
        AlreadySupervised: somebody was quicker.
    """
    return Supervisor(plan, on_change).run()


def stop(home: Path, timeout_seconds: float = STOP_SECONDS) -> Stack | None:
    """End the supervisor, which ends the services in order, and wait for it.

    Returns:
        How the stack ended; None: none was running.

    Raises:
        StackFailed: it does not end in time.
    """
    pid = supervisor_pid(home)
    if pid is None:
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return read_stack(home)
    try:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        poll = select.poll()  # a pidfd is readable once its process has ended
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(1000 * timeout_seconds):
            raise StackFailed(f"the supervisor, process {pid}, does not end within {timeout_seconds:.0f} s")
    finally:
        os.close(pidfd)
    return read_stack(home)


def _wait_until_running(layout: Layout, pid: int, on_change: Callable[[Stack], None] | None) -> Stack:
    told: Stack | None = None
    while True:
        ended = os.waitpid(pid, os.WNOHANG)[0] == pid
        stack = read_stack(layout.home)
        if stack is not None and stack != told and stack.pid == pid:
            told = stack
            if on_change is not None:
                on_change(stack)
            if stack.state is StackState.RUNNING:
                return stack
        if ended:
            raise StackFailed(_why_it_ended(layout, pid))
        time.sleep(_POLL_SECONDS)


def _start_supervisor(layout: Layout, plan_file: Path) -> int:
    environment = {key: value for key, value in os.environ.items() if key != JOB_KEY_ENVIRONMENT_KEY}
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    log = str(layout.log_file("supervisor"))
    # posix_spawn and not subprocess.Popen: that warns when its object goes before the process does, as here it shall.
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-P", "-m", "surefoot.embedded", str(plan_file)],
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, append, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


def _why_it_ended(layout: Layout, pid: int) -> str:
    stack = read_stack(layout.home)
    if stack is not None and stack.pid == pid and stack.detail:
        return stack.detail
    if stack is not None and stack.pid == pid and stack.state is StackState.STOPPED:
        return "the stack was stopped while it was starting"
    return f"the supervisor has ended; see {layout.log_file('supervisor')}"


def _last_ports(layout: Layout) -> dict[str, int]:
    stack = read_stack(layout.home)
    urls = stack.urls if stack is not None else {}
    return {name: port for name, url in urls.items() if (port := _port_of(url)) is not None}


def _port_of(url: str) -> int | None:
    try:
        return urlsplit(url).port
    except ValueError:  # the file is not to be trusted
        return None


def _token(layout: Layout) -> str:
    """Return the token of the api, made once: on a machine of many, loopback alone keeps nobody out."""
    given = os.environ.get("SUREFOOT_API_TOKEN", "")
    if not given and layout.token_file.exists():
        return layout.token_file.read_text(encoding="ascii").strip()
    token = given or secrets.token_urlsafe(32)
    layout.token_file.touch(mode=0o600)
    layout.token_file.write_text(token + "\n", encoding="ascii")
    return token
