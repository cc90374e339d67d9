"""A real Redis-compatible server of a test's own: on a free port, in a folder, killable."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from helpers.waiting import wait_until
from surefoot.embedded.server import server_arguments, server_command


class RealServer:
    """Keeps its port and its data over stop, kill and start. Dies with the test run."""

    def __init__(self, directory: Path, command: list[str] | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = redis.Redis(port=self.port, protocol=2, retry=Retry(NoBackoff(), 0), socket_timeout=5)
        self._command = command or server_command()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> RealServer:
        command = [*self._command, *server_arguments(self.port, self.directory)]
        with (self.directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command], stdout=log, stderr=log
            )
        wait_until(self._answers, 20, "the server answers")
        return self

    def stop(self) -> None:
        """End it in good order; everything is on disk."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """It keeps its connections and answers nobody."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        if self.is_running:
            self.kill()
        self.client.close()

    def _end(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(10)
        self._process = None

    def _answers(self) -> bool:
        assert self.is_running, (self.directory / "server.log").read_text()[-2000:]
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False


# A shell of its own, as preexec_fn is unsafe with threads: ask for the death signal, then become the server.
_DIE_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
