"""The stack that the demo starts for itself: `surefoot up --foreground` as a child that dies with the demo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from surefoot.embedded.stack_file import Stack, StackState, running_stack
from surefoot.errors import SurefootError
from surefoot.processes import command_words, find_processes, set_parent_death_signal

START_SECONDS = 150.0
STOP_SECONDS = 300.0
POLL_SECONDS = 0.05


class DemoFailed(SurefootError):
    """The demo cannot go on; the message says why."""


def up_command(home: Path) -> list[str]:
    """Return the command that starts the stack, as a user would type it."""
    return [sys.executable, "-P", "-m", "surefoot.cli.main", "up", "--foreground", "--home", str(home)]


class DemoStack:
    """The services, in a session of their own, so that Ctrl-C reaches only the demo.

    Leaving the `with` block stops them in order, as `surefoot down` does, and looks for what is left.

    Args:
        home: Folder of the stack.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.log_path = home.with_name("up.log")
        self.leftovers: list[str] = []
        """What was still there when the stack had stopped; the block ended it."""
        self.exit_code: int | None = None

    def __enter__(self) -> DemoStack:
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                up_command(self.home),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=set_parent_death_signal,  # noqa: PLW1509  no thread of ours is running yet
            )
        return self

    def wait_until_ready(self) -> Stack:
        """Return the running stack.

        Raises:
            DemoFailed: it did not come up.
        """
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            stack = running_stack(self.home)
            if stack is not None and stack.state is StackState.RUNNING:
                return stack
            time.sleep(POLL_SECONDS)
        lines = self.log_path.read_text(errors="replace").strip().splitlines()
        raise DemoFailed(f"the services did not start: {lines[-1] if lines else 'see'} ({self.log_path})")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.down()

    def down(self) -> None:
        """Stop the services, wait, and end what should have ended by itself. Idempotent."""
        if self.exit_code is not None:
            return
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self.exit_code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self.exit_code = self._process.wait()
        left = processes_of(self.home)
        self.leftovers = [f"process {pid} ({name})" for pid, name in left.items()]
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def processes_of(home: Path) -> dict[int, str]:
    """Return the processes, by pid, that have this home in their environment: services, launchers, ranks, drains."""
    words = {pid: command_words(pid) for pid in find_processes("SUREFOOT_HOME", str(home))}
    return {pid: b" ".join(line[:5]).decode(errors="replace") for pid, line in words.items() if line}
