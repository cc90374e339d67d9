"""Signals to the launcher, taken in order by its main loop and not in the middle of something."""

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
    """Collects signals; a context manager for the main thread. `fileno()` is readable when there are some."""

    def __enter__(self) -> SignalInbox:
        """Install the handlers."""
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before: dict[signal.Signals, _Handler] = {}
        for number in (*STOP_SIGNALS, SAVE_SIGNAL):
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: the end of the terminal is not to be minded
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

    def pending(self) -> bool:
        """Tell whether there are signals to take."""
        return bool(select.select([self._reader], [], [], 0)[0])

    def take(self) -> list[int]:
        """Return the signals since the last call, in order. Never blocks."""
        try:
            return list(os.read(self._reader, 4096))
        except BlockingIOError:
            return []


def _note(number: int, frame: FrameType | None) -> None:
    """Do nothing: the interpreter has written the number to the wakeup descriptor before it calls this."""
    del number, frame
