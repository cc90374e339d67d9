"""Run a service: signals, logs, health, and a loop that waits for what it depends on instead of dying.

A service's `main()` is `return run_service(NAME, load_settings(DetectorSettings), build)`. Its `build(runtime)` makes
and connects the parts, and returns one bounded turn of the loop, a second at most when idle: `return consumer.turn`,
say.
"""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import FrameType

import structlog

from surefoot.errors import EXIT_OK, SurefootError, Unavailable
from surefoot.settings import CommonSettings
from surefoot.telemetry import logging as logs
from surefoot.telemetry.health import HealthFile, HealthState

Turn = Callable[[], None]
"""One turn of a service's loop. Raises Unavailable when something outside does not answer; it is then called again."""

FIRST_RETRY_SECONDS = 0.1
LONGEST_RETRY_SECONDS = 2.0

log = structlog.get_logger(__name__)


class StopEvent(threading.Event):
    """An event that a signal handler may set.

    A handler runs between two instructions of the main thread. If those are in `wait` of a plain Event, its `set`
    waits for a lock that the same thread holds: for ever. Here `set` takes no lock; a pipe wakes who waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_set = False
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def is_set(self) -> bool:
        """Return whether it is set. Any thread."""
        return self._is_set

    def set(self) -> None:
        """Set it, for good. Any thread, any signal handler."""
        self._is_set = True
        with suppress(BlockingIOError):  # it has been set very often
            os.write(self._writer, b"!")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, `timeout` seconds at most. Any thread; the byte stays, so that all of them wake."""
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        poll.poll(None if timeout is None else max(0, math.ceil(1000 * timeout)))
        return self._is_set

    def close(self) -> None:
        """Give the descriptors back. Nobody may use it any more."""
        os.close(self._reader)
        os.close(self._writer)


class Runtime:
    """What a service gets from its surroundings.

    Attributes:
        name: Of the service.
        stopping: Set once SIGTERM or SIGINT came; long waits must look at it.
        on_exit: What is to be closed, in reverse order, when the service ends or `build` raises Unavailable.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.stopping = StopEvent()
        self.on_exit = ExitStack()


def run_service(name: str, settings: CommonSettings, build: Callable[[Runtime], Turn]) -> int:
    """Run a service until SIGTERM or SIGINT. Main thread of the process only.

    Args:
        name: Of the service; appears in logs and health.
        settings: Its settings.
        build: Makes and connects the parts and returns the turn. Called again as long as it raises Unavailable.

    Returns:
        The exit code: 0 after a signal; that of a SurefootError that `build` or a turn raises.
    """
    logs.configure(name, settings.log_level)
    runtime = Runtime(name)
    _stop_on_signals(runtime.stopping)
    health = HealthFile(settings.health_dir, name)
    health.turn(HealthState.STARTING)
    try:
        with runtime.on_exit:
            _loop(runtime, health, build)
    except SurefootError as error:
        log.error("the service cannot go on", error=str(error))
        return error.exit_code
    health.remove()
    log.info("stopped")
    return EXIT_OK


def _stop_on_signals(stopping: threading.Event) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def _loop(runtime: Runtime, health: HealthFile, build: Callable[[Runtime], Turn]) -> None:
    turn: Turn | None = None
    outage = _Outage()
    while not runtime.stopping.is_set():
        try:
            if turn is None:
                turn = build(runtime)
                log.info("started")
            turn()
        except Unavailable as error:
            if turn is None:
                runtime.on_exit.close()  # of the parts that this build made; the next build makes them anew
            health.turn(HealthState.WAITING, str(error))
            runtime.stopping.wait(outage.next_delay_seconds(error))
        else:
            outage.over()
            health.turn(HealthState.OK)


class _Outage:
    """One message when an outage begins and one when it is over, however often it is tried in between."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._delay_seconds = FIRST_RETRY_SECONDS

    def next_delay_seconds(self, error: Unavailable) -> float:
        if self._since is None:
            self._since = time.monotonic()
            self._delay_seconds = FIRST_RETRY_SECONDS
            log.warning("waiting; nothing is lost meanwhile", error=str(error))
        delay, self._delay_seconds = self._delay_seconds, min(LONGEST_RETRY_SECONDS, 2 * self._delay_seconds)
        return delay

    def over(self) -> None:
        if self._since is not None:
            log.info("going on", outage_seconds=round(time.monotonic() - self._since, 1))
            self._since = None
