"""Run a service: signals, logs, health, and a loop that waits for what it depends on instead of dying.

A service's `main()` is `return run_service("detector", Settings(), build)`. Its `build(runtime)` makes and connects
the parts, and returns one bounded turn of the loop, a second at most when idle: `return consumer.turn`, say.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
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


class Runtime:
    """What a service gets from its surroundings.

    Attributes:
        name: Of the service.
        stopping: Set once SIGTERM or SIGINT came; long waits must look at it.
        on_exit: What is to be closed, in reverse order, when the service ends.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.stopping = threading.Event()
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
