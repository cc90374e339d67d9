"""The launcher of one job as a child process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from surefoot.checkpoint.retention import WRITER_PRUNES_KEY
from surefoot.small_files import write_atomically
from surefoot.spec import JobSpec

LAUNCHER_COMMAND = (sys.executable, "-m", "surefoot_worker.launcher")
_EXPLANATION_BYTES = 4096


class LauncherProcess:
    """Starts one launcher and ends it. It dies with this process. Main thread only: the kernel watches that thread.

    Args:
        spec: The job, with absolute paths.
        cause: For the attempt record.
        from_seed: Start over although the job has progress.
        command: What to start.

    Raises:
        OSError: run_dir cannot be written, or no process can be made.
    """

    def __init__(
        self, spec: JobSpec, *, cause: str, from_seed: bool, command: Sequence[str] = LAUNCHER_COMMAND
    ) -> None:
        logs = spec.job_run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        spec_file = spec.job_run_dir / "spec.json"
        write_atomically(spec_file, spec.model_dump_json(exclude_unset=True))
        words = [*command, str(spec_file), "--cause", cause, "--die-with", str(os.getpid())]
        self._said = logs / "launcher.err"
        with self._said.open("wb") as output:
            self._process = subprocess.Popen(
                [*words, "--from-seed"] if from_seed else words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in a terminal is for the worker to handle
                # Where services run a job the writer removes checkpoints: it knows what pending commands name.
                env=os.environ | {WRITER_PRUNES_KEY: "1"},
            )
        self._pidfd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def fileno(self) -> int:
        """Return a descriptor that is readable once the process has ended; -1 once `poll` has said so."""
        return self._pidfd

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when it has ended."""
        if self._pidfd < 0:
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def poll(self) -> int | None:
        """Return the exit code once it has ended (negative: the signal), and let go of the process."""
        code = self._process.poll()
        if code is not None and self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        return code

    def explanation(self) -> str:
        """Return the last line that it wrote to stderr."""
        data = self._said.read_bytes()[-_EXPLANATION_BYTES:]
        lines = data.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return last.removeprefix("surefoot: ").removeprefix("error: ")
