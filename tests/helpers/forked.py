"""Real processes in milliseconds: forked from one that has everything imported and has done nothing with it yet.

    with Forge("helpers.toy_job") as forge:
        child = forge.fork("train", {"plan": ...}, log=path)
        assert child.wait(10) == 0

The parent of all children is a process of its own (`python helpers/forked.py MODULE`), since a process with threads
(pytest, torch after its first operation) must not fork. Each child runs one function of the module and ends with its
result, an exit code; none outlives the forking process.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from surefoot.processes import set_parent_death_signal

TESTS = Path(__file__).parents[1]


class Child:
    """A forked process, to be waited for once."""

    def __init__(self, forge: Forge, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None
        self._forge = forge

    def poll(self) -> int | None:
        """Return its exit code (-N: killed by signal N), None while it runs."""
        if self.code is None:
            self.code = self._forge.ask("poll", self.pid)
        return self.code

    def wait(self, timeout_seconds: float) -> int:
        """Return its exit code when it has ended; it is killed, and the test fails, when it does not."""
        if not self.has_ended_within(timeout_seconds):
            self.kill()
            raise AssertionError(f"process {self.pid} did not end in {timeout_seconds} s")
        assert self.code is not None
        return self.code

    def has_ended_within(self, timeout_seconds: float) -> bool:
        """Wait so long at most; return whether it has ended."""
        if self.code is None:
            self.code = self._forge.ask("wait", self.pid, timeout_seconds)
        return self.code is not None

    def dump_stacks(self) -> None:
        """Make it write what its threads are doing to its log."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGUSR1)

    def kill(self) -> int:
        """SIGKILL it, unless it has ended; return its exit code."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own
        return self.wait(10)


class Forge:
    """The process that forks. Not for several threads.

    Args:
        module: Imported before anything is forked; the home of the functions that children run.
    """

    def __init__(self, module: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
        )
        try:
            assert self._read() == "ready", f"{module} cannot be imported"
        except BaseException:
            self._process.communicate()
            raise

    def __enter__(self) -> Forge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()  # it has nothing to tidy up, and torch would take a second to
        self._process.communicate()

    def fork(
        self, function: str, arguments: Mapping[str, Any], *, log: Path, env: Mapping[str, str] | None = None
    ) -> Child:
        """Run a function of the module in a new process.

        Args:
            function: Its name; it returns the exit code.
            arguments: Its keyword arguments, JSON.
            log: Its standard output and error are appended to this.
            env: Added to its environment variables.
        """
        return Child(self, self.ask("fork", function, dict(arguments), str(log), dict(env or {})))

    def ask(self, *request: Any) -> Any:
        """Send a request to the forking process and return its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline() or '"the forking process has ended"')


def _serve(module: Any) -> None:
    _answer("ready")
    for line in sys.stdin:
        verb, *request = json.loads(line)
        if verb == "fork":
            _answer(_fork(module, *request))
        else:
            _answer(_exit_code(*request) if verb == "poll" else _await_exit(*request))


def _answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


def _fork(module: Any, function: str, arguments: dict[str, Any], log: str, env: dict[str, str]) -> int:
    parent_pid = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        set_parent_death_signal(parent_pid)
        os.close(0)
        os.open(os.devnull, os.O_RDONLY)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(env)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        code = getattr(module, function)(**arguments)
    except BaseException:  # noqa: BLE001  a child never comes back from here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _exit_code(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def _await_exit(pid: int, timeout_seconds: float) -> int | None:
    fd = os.pidfd_open(pid)  # not reaped yet, so this works when it has ended already
    try:
        select.select([fd], [], [], timeout_seconds)
    finally:
        os.close(fd)
    return _exit_code(pid)


if __name__ == "__main__":
    _serve(importlib.import_module(sys.argv[1]))
