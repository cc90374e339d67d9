"""One supervised process: started, seen to be ready, started again when it ends, ended."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from surefoot.embedded.log_files import LogFile
from surefoot.embedded.plan import Readiness, Service
from surefoot.embedded.server import answers_ping
from surefoot.embedded.stack_file import ServiceState, ServiceStatus
from surefoot.processes import set_parent_death_signal
from surefoot.telemetry.health import HealthState, read_health

FIRST_DELAY_SECONDS = 0.1
LONGEST_DELAY_SECONDS = 5.0
WELL_SECONDS = 30.0
"""Ready for so long, it starts with the shortest delay again."""
ANSWER_SECONDS = 1.0

_READ_BYTES = 65536


class Child:
    """A service as the supervisor holds it. Main thread of a process without other threads.

    Args:
        service: What to run.
        environment: All its variables.
        log_path: Where its output goes.
        health_dir: Where it says how it is.
    """

    def __init__(self, service: Service, environment: Mapping[str, str], log_path: Path, health_dir: Path) -> None:
        self.service = service
        self.status = ServiceStatus(since_seconds=time.monotonic())
        self.num_failed_starts = 0
        self.last_exit: int | None = None
        self.was_ready = False
        self.next_start = 0.0
        self._environment = environment
        self._health_dir = health_dir
        self._log = LogFile(log_path, service.name)
        self._delay_seconds = FIRST_DELAY_SECONDS
        self._kill_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._output_ended = False

    @property
    def is_alive(self) -> bool:
        """Whether its process has not been seen to end."""
        return self._process is not None

    @property
    def descriptors(self) -> list[int]:
        """What becomes readable when it writes or ends."""
        if self._process is None:
            return []
        # An output that was closed is readable for ever.
        return [self._pidfd] if self._output_ended else [self._pidfd, self._output()]

    def start(self) -> None:
        """Start the process; it dies with this one."""
        supervisor = os.getpid()
        try:
            self._process = subprocess.Popen(
                self.service.command,
                env=dict(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in a terminal is for the supervisor to handle, in order
                preexec_fn=lambda: set_parent_death_signal(supervisor),  # noqa: PLW1509  there is one thread
            )
        except OSError as error:
            self._log.feed(f"it cannot be started: {error}\n".encode())
            self._ended(127)
            return
        os.set_blocking(self._output(), False)
        self._output_ended = False
        self._pidfd = os.pidfd_open(self._process.pid)
        self._put(ServiceState.STARTING, self._process.pid)

    def pump_log(self) -> None:
        """Carry what it wrote into its log. Never blocks."""
        with suppress(BlockingIOError):
            while data := os.read(self._output(), _READ_BYTES):
                self._log.feed(data)
            self._output_ended = True

    def reap(self) -> bool:
        """See whether it has ended; True: it has, since the last call."""
        if self._process is None or (code := self._process.poll()) is None:
            return False
        self.pump_log()
        assert self._process.stdout is not None
        self._process.stdout.close()
        os.close(self._pidfd)
        self._process = None
        self._ended(code)
        return True

    def look(self) -> bool:
        """See whether it has become ready, or is not any more; True: its state has changed."""
        state = self.status.state
        if self._process is not None and state is ServiceState.STARTING and self._is_ready():
            self.was_ready, self.num_failed_starts = True, 0
            self._put(ServiceState.READY, self.status.pid)
        return self.status.state is not state

    def send_stop(self) -> None:
        """SIGTERM; `kill_if_late` follows up."""
        if self._process is None:
            self._put(ServiceState.STOPPED, 0)
            return
        self._kill_at = time.monotonic() + self.service.stop_seconds
        self._signal(signal.SIGTERM)

    def kill_if_late(self) -> bool:
        """SIGKILL when it does not end after SIGTERM; True: that was now."""
        if self._process is None or not self._kill_at or time.monotonic() < self._kill_at:
            return False
        self._kill_at = float("inf")
        self._signal(signal.SIGKILL)
        return True

    def close(self) -> None:
        """Close its log."""
        self._log.close()

    def _output(self) -> int:
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def _ended(self, code: int) -> None:
        self.last_exit = code
        how = f"ended with exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"
        if self._kill_at:
            self._put(ServiceState.STOPPED, 0, how)
        elif self.service.ready is Readiness.ENDED and code == 0:
            self.was_ready = True
            self._put(ServiceState.DONE, 0)
        else:
            self._back_off(how)

    def _back_off(self, how: str) -> None:
        now = time.monotonic()
        if self.status.state is ServiceState.READY and now - self.status.since_seconds >= WELL_SECONDS:
            self._delay_seconds = FIRST_DELAY_SECONDS
        self.num_failed_starts += not self.was_ready
        self.next_start = now + self._delay_seconds
        self._delay_seconds = min(LONGEST_DELAY_SECONDS, 2 * self._delay_seconds)
        self.status.restarts += 1
        self._put(ServiceState.BACKING_OFF, 0, how)

    def _is_ready(self) -> bool:
        if self.service.ready is Readiness.ANSWERS:
            return answers_ping(self.service.url, ANSWER_SECONDS)
        if self.service.ready is not Readiness.HEALTH:
            return self.service.ready is Readiness.ALIVE
        health = read_health(self._health_dir, self.service.name)
        # The file may be of the process before this one.
        is_well = health.state is HealthState.OK and health.pid == self.status.pid
        return is_well and (not self.service.url or answers_http(self.service.url))

    def _put(self, state: ServiceState, pid: int, detail: str = "") -> None:
        self.status.state, self.status.pid = state, pid
        self.status.detail = detail or self.status.detail
        self.status.since_seconds = time.monotonic()


def answers_http(url: str, timeout_seconds: float = ANSWER_SECONDS) -> bool:
    """Return whether a GET is answered with 200. No proxy, no redirect."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_seconds)
    try:
        connection.request("GET", parts.path or "/")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
