"""The fork server of one launcher: multiprocessing's own, with our preload, and a check that it worked."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from multiprocessing import forkserver
from pathlib import Path
from signal import SIGKILL
from typing import Any

from surefoot_worker.launcher.preload import REQUEST_ENVIRONMENT_KEY, PreloadAnswer, PreloadRequest

_PRELOAD_MODULE = "surefoot_worker.launcher.preload"
_LIMIT_SECONDS = 300.0
_server: Any = getattr(forkserver, "_forkserver")  # noqa: B009  the one instance; only its pid and _stop() are used


class ForkServer:
    """Starts multiprocessing's fork server with our preload. Launcher's main thread only: it dies with that thread.

    Args:
        folder: For the pipe that the answer comes through.
        log: File for what imported modules print.
        words: The job's entrypoint.
        module_path: sys.path of the ranks.
    """

    def __init__(self, folder: Path, log: Path, words: list[str], module_path: list[str]) -> None:
        self._fifo = folder / "preload.fifo"
        self._request = PreloadRequest(os.getpid(), str(self._fifo), str(log), words, module_path)
        self._reader = -1
        self._pid: int | None = None

    @property
    def pid(self) -> int:
        """Its process id: the parent of the ranks."""
        assert self._pid is not None, "it has been started"
        return self._pid

    def start(self) -> None:
        """Start it and return at once; it goes on importing while the caller does other things."""
        self._fifo.unlink(missing_ok=True)
        os.mkfifo(self._fifo, 0o600)
        self._reader = os.open(self._fifo, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        multiprocessing.set_forkserver_preload([_PRELOAD_MODULE])
        os.environ[REQUEST_ENVIRONMENT_KEY] = json.dumps(asdict(self._request))
        try:
            with hidden_main():
                forkserver.ensure_running()
            self._pid = int(_server._forkserver_pid)
        except OSError:
            os.close(self._reader)
            raise
        finally:
            del os.environ[REQUEST_ENVIRONMENT_KEY]

    def wait_ready(self, give_up: Callable[[], bool] = lambda: False) -> str | None:
        """Wait until everything is imported.

        Args:
            give_up: Asked now and then whether there is no need to wait any longer.

        Returns:
            Why ranks must not be forked from it, None when they may.
        """
        process = os.pidfd_open(self.pid)
        try:
            text = self._read_answer(process, give_up)
        finally:
            os.close(process)
            os.close(self._reader)
            self._fifo.unlink(missing_ok=True)
        if not text.endswith(b"\n"):
            return "the fork server did not say that it is ready"
        return PreloadAnswer(**json.loads(text)).problem

    def _read_answer(self, process: int, give_up: Callable[[], bool]) -> bytes:
        deadline = time.monotonic() + _LIMIT_SECONDS
        text = b""
        while not text.endswith(b"\n") and time.monotonic() < deadline and not give_up():
            ready, _, _ = select.select([self._reader, process], [], [], 0.2)
            if self._reader in ready:
                part = os.read(self._reader, 65536)
                if not part:  # it has closed the pipe
                    break
                text += part
            elif ready:  # it ended before it opened the pipe
                break
        return text

    def is_running(self) -> bool:
        """Tell whether the one that `start` started is there.

        Where it died between two ranks, multiprocessing starts another by itself, which lacks all that ours has.
        """
        return self._pid is not None and _server._forkserver_pid == self._pid and _state(self._pid) not in "ZX"

    def stop(self) -> None:
        """Kill it and with it any rank, and forget it, so that a later `start` starts a new one."""
        if _server._forkserver_pid is not None:
            with suppress(ProcessLookupError):
                os.kill(_server._forkserver_pid, SIGKILL)
            _server._stop()
        self._pid = None


@contextmanager
def hidden_main() -> Iterator[None]:
    """Hide what `__main__` is from multiprocessing, which would import it again in every child."""
    main = sys.modules["__main__"]
    before = {name: getattr(main, name, None) for name in ("__spec__", "__file__")}
    for name in before:
        setattr(main, name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(main, name, value)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(") ")[2][:1]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"
