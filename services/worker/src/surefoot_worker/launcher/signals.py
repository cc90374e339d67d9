"""Signals to the launcher, taken in order by its main loop and not in the middle of something. Imports nothing slow."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAVE_SIGNAL = signal.SIGUSR1

_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class SignalInbox:
    """Collects signals; a context manager for the main thread. `fileno()` is readable when new ones are there."""

    def __enter__(self) -> SignalInbox:
        """Install the handlers."""
        self._looked_at: list[int] = []
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before: dict[signal.Signals, _Handler] = {}
        for number in _ours():
            self._before[number] = signal.signal(number, _note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        """Put back the handlers that were there."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._reader)
        os.close(self._writer)

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._reader

    def is_stop_pending(self) -> bool:
        """Tell whether a signal to stop is among those to take."""
        self._looked_at += self._read()
        return any(number in STOP_SIGNALS for number in self._looked_at)

    def take(self) -> list[int]:
        """Return the signals since the last call, in order. Never blocks."""
        taken = self._looked_at + self._read()
        self._looked_at = []
        return taken

    def wait(self, timeout_seconds: float) -> None:
        """Wait until a signal comes or the time is over."""
        select.select([self._reader], [], [], timeout_seconds)

    def _read(self) -> list[int]:
        try:
            return list(os.read(self._reader, 4096))
        except BlockingIOError:
            return []


def let_pass() -> None:
    """Let the launcher's signals pass in this process: one that goes to every process of the job ends nobody.

    A handler that does nothing, not SIG_IGN: what a program executes would inherit that, and its terminate() would
    have no effect.
    """
    for number in _ours():
        signal.signal(number, _note)
        signal.siginterrupt(number, False)


def _ours() -> list[signal.Signals]:
    # nohup: the end of the terminal is not to be minded, by nobody down the line.
    with_hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [number for number in (*STOP_SIGNALS, SAVE_SIGNAL) if with_hangup or number is not signal.SIGHUP]


def _note(number: int, frame: FrameType | None) -> None:
    """Do nothing: the interpreter has written the number to the wakeup descriptor before it calls this."""
    del number, frame
