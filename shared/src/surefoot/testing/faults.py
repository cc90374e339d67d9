"""Faults said in a sentence: `kill(rank=1).at(step=40)`.

Real signals to real processes, from outside: an injector watches the ranks' progress pages and acts when the rank
gets there.

    with FaultInjector(folder, [kill(rank=1).at(step=40), kill(rank=0).at(step=60)]) as injector:
        ...run the job...
    assert len(injector.done) == 2
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from surefoot.progress import Phase, Progress, ProgressReader, progress_path

_POLL_SECONDS = 0.0005


@dataclass(frozen=True)
class Fault:
    """A signal to a rank when it has completed a step.

    Attributes:
        rank: Which rank.
        step: It acts when the rank has completed this step, or a later one.
        signal: What is sent.
    """

    rank: int
    step: int
    signal: signal.Signals


@dataclass(frozen=True)
class Kill:
    """The beginning of the sentence; `at` ends it."""

    rank: int
    signal: signal.Signals

    def at(self, *, step: int) -> Fault:
        """Say when."""
        return Fault(self.rank, step, self.signal)


def kill(*, rank: int, with_signal: signal.Signals = signal.SIGKILL) -> Kill:
    """Begin a sentence: send a signal to a rank."""
    return Kill(rank, with_signal)


@dataclass(frozen=True)
class InjectedFault:
    """A fault that happened.

    Attributes:
        fault: What was asked for.
        pid: Who got it.
        attempt: In which attempt.
        step: The step the rank had completed.
        monotonic_seconds: CLOCK_MONOTONIC just before the signal.
    """

    fault: Fault
    pid: int
    attempt: int
    step: int
    monotonic_seconds: float


class FaultInjector:
    """Injects faults in order, on a thread of its own. Each waits for an attempt newer than the last one's.

    Args:
        folder: The job's staging folder; it need not be there yet.
        faults: What to do.
    """

    def __init__(self, folder: Path, faults: Sequence[Fault]) -> None:
        self._folder = folder
        self._faults = faults
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fault-injector", daemon=True)
        self.done: list[InjectedFault] = []

    def __enter__(self) -> FaultInjector:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        attempt = 0
        for fault in self._faults:
            progress = wait_for_progress(self._folder, fault.rank, fault.step, attempt, self._stop)
            if progress is None:
                return
            attempt = progress.attempt
            injected = InjectedFault(fault, progress.pid, attempt, progress.step, time.monotonic())
            os.kill(progress.pid, fault.signal)
            self.done.append(injected)


def wait_for_progress(
    folder: Path, rank: int, step: int, after_attempt: int, stop: threading.Event
) -> Progress | None:
    """Wait until a rank has completed a step, in a newer attempt than `after_attempt`; None when `stop` is set first.

    A rank that has already left its loop (phase CLOSE) does not count: it is past the step.
    """
    page = ProgressReader(progress_path(folder, rank))
    while not stop.wait(_POLL_SECONDS):
        progress = page.read()
        if (
            progress is not None
            and progress.attempt > after_attempt
            and progress.step >= step
            and progress.phase is Phase.STEP
        ):
            return progress
    return None
