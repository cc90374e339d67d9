"""Carries commands for one job from the bus into its staging folder."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import structlog

from surefoot.bus.base import Bus, Delivery
from surefoot.bus.streams import commands_stream
from surefoot.errors import BusUnavailable
from surefoot.events import StopTraining
from surefoot.spec import JobSpec
from surefoot_worker.handlers import COMMANDS
from surefoot_worker.service.state_files import Delivered, read_state, write_state

_BLOCK_SECONDS = 1.0
_COUNT = 100
_RETRY_SECONDS = 0.2
_LONGEST_RETRY_SECONDS = 2.0

log = structlog.get_logger(__name__)


class CommandCourier:
    """Reads `surefoot:commands:<job>` on a thread of its own while the job has a launcher.

    At least once and in order: how far it is stands in `<run_dir>/<job>/delivered.json`, written after the command is
    in the folder. What was ordered while nobody was here is delivered too; the ranks refuse what is out of date.

    Args:
        spec: The job, with absolute paths.
        staging: Its staging folder; it need not be there yet.
        bus: Where commands come from.
        attempt: Returns the attempt that trains now; an order to stop that was meant for another one is passed over.

    Attributes:
        stop_order: Recovery's order to save and stop. It counts as delivered only by `acknowledge_stop`, so that the
            next worker obeys it should this one die before the job has stopped.
    """

    def __init__(self, spec: JobSpec, staging: Path, bus: Bus, attempt: Callable[[], int | None]) -> None:
        self.stop_order: StopTraining | None = None
        self._attempt = attempt
        self._job = spec.job
        self._staging = staging
        self._bus = bus
        self._state_file = spec.job_run_dir / "delivered.json"
        self._after = read_state(self._state_file, Delivered).after
        self._is_checked = self._after == "0"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"commands-{spec.job}", daemon=True)
        self._thread.start()

    def acknowledge_stop(self) -> None:
        """Take note that the job has stopped as ordered."""
        write_state(self._state_file, Delivered(after=self._after))

    def close(self) -> None:
        """End the thread, which may take a second; the caller does not wait for it."""
        self._stop.set()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        delay_seconds = _RETRY_SECONDS
        while not self._stop.is_set():
            try:
                if self._staging.exists():
                    self._check()
                    self._deliver(self._bus.read(commands_stream(self._job), self._after, _COUNT, _BLOCK_SECONDS))
                    delay_seconds = _RETRY_SECONDS
                else:
                    self._stop.wait(_RETRY_SECONDS)
            except BusUnavailable:  # the pump has said so
                self._stop.wait(delay_seconds)
                delay_seconds = min(_LONGEST_RETRY_SECONDS, 2 * delay_seconds)
            except Exception:
                log.exception("a command cannot be delivered", job_id=self._job)
                self._stop.wait(_LONGEST_RETRY_SECONDS)

    def _check(self) -> None:
        """Begin anew, once, where the stream has nothing as new as what counts as delivered.

        Then the file is wrong, or the bus lost what it had and counts again; waiting would be for ever.
        """
        if not self._is_checked:
            newest = "0"
            while entries := self._bus.read(commands_stream(self._job), newest, _COUNT, 0.0):
                newest = entries[-1].id
            if _order(self._after) > _order(newest):
                if newest != "0":
                    log.warning("commands are read from the first", job_id=self._job, after=self._after, newest=newest)
                self._after = "0"
            self._is_checked = True

    def _deliver(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            message = delivery.message
            if isinstance(message, StopTraining) and message.attempt == self._attempt():
                self._after = delivery.id
                self.stop_order = message
                self._stop.set()  # nothing that follows is of use
                return
            handle = COMMANDS.get(type(message)) if message is not None else None
            if self._stop.is_set():
                return  # the job has ended meanwhile; the next start takes it up
            if handle is not None and message is not None and message.job == self._job:
                handle(self._staging, message)
                log.info("command delivered", job_id=self._job, attempt=message.attempt, command=message.type)
            elif delivery.problem is not None:
                log.error("a command cannot be understood", job_id=self._job, error=delivery.problem)
            self._after = delivery.id
        if deliveries:
            write_state(self._state_file, Delivered(after=self._after))


def _order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number or 0)
