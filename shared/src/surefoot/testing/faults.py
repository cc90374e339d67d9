"""Faults said in a sentence: `kill(rank=1).at(step=40)`, `blow_up(factor=1e4).at(step=190)`.

Real signals to real processes, from outside: an injector watches the ranks' progress pages and acts when the rank
gets there.

    with FaultInjector(folder, [kill(rank=1).at(step=40), kill(rank=0).at(step=60)]) as injector:
        ...run the job...
    assert len(injector.done) == 2

What must happen inside a rank goes to it in the environment; it is not in any spec, so nobody meets it by mistake:

    environment[TRAINING_FAULT_ENVIRONMENT_KEY] = str(blow_up(factor=1e4).at(step=190))
"""

from __future__ import annotations

import math
import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from surefoot.errors import UsageError
from surefoot.progress import Phase, Progress, ProgressReader, progress_path

TRAINING_FAULT_ENVIRONMENT_KEY = "SUREFOOT_TRAINING_FAULT"
"""A fault inside the training process, as its sentence; read by `attach` on every rank."""

_POLL_SECONDS = 0.0005
_BLOW_UP = re.compile(r"blow_up\(factor=([0-9.eE+-]+)\)\.at\(step=([0-9]+)\)", re.ASCII)


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
class UpdateFault:
    """Gradients that are multiplied just before the optimizer steps, after clipping and beyond all guards.

    Attributes:
        factor: What they are multiplied by.
        step: In which step, in a job that left out no batch.
    """

    factor: float
    step: int

    @property
    def position(self) -> int:
        """The batch that it comes with: a roll-back that does not leave out the batch meets it again."""
        return self.step - 1

    def __str__(self) -> str:
        return f"blow_up(factor={self.factor!r}).at(step={self.step})"


@dataclass(frozen=True)
class BlowUp:
    """The beginning of the sentence; `at` ends it."""

    factor: float

    def at(self, *, step: int) -> UpdateFault:
        """Say when.

        Raises:
            UsageError: there is no such step.
        """
        if step < 1:
            raise UsageError(TRAINING_FAULT_ENVIRONMENT_KEY, f"steps are counted from 1 (got {step})")
        return UpdateFault(self.factor, step)


def blow_up(*, factor: float) -> BlowUp:
    """Begin a sentence: multiply the gradients of one update.

    Raises:
        UsageError: the factor is not a positive, finite number.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise UsageError(TRAINING_FAULT_ENVIRONMENT_KEY, f"factor must be positive and finite (got {factor})")
    return BlowUp(factor)


def parse_training_fault(text: str) -> UpdateFault:
    """Return the fault that a sentence asks for, e.g. `blow_up(factor=1e4).at(step=190)`.

    Raises:
        UsageError: it is no such sentence.
    """
    match = _BLOW_UP.fullmatch(text)
    try:
        factor = float(match[1]) if match is not None else math.nan
    except ValueError:
        match = None
    if match is None:
        example = "blow_up(factor=1e4).at(step=190)"
        raise UsageError(TRAINING_FAULT_ENVIRONMENT_KEY, f"must be a sentence such as {example} (got {text!r})")
    return blow_up(factor=factor).at(step=int(match[2]))


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
