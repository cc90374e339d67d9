"""The drain of a toy job: started, killed, sent home. One at a time is at work, ours or one that a rank started."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from helpers.forked import Child, Forge
from helpers.toy_oracle import JOB, STAGING_DIR, Oracle
from helpers.waiting import wait_until
from surefoot.checkpoint.locks import holder_pid
from surefoot.checkpoint.staging_folder import StagingFolder
from surefoot.spec import RetentionSpec

PATIENCE_SECONDS = 20.0


class ToyDrain:
    """The drain of one job.

    Args:
        oracle: Whose job.
        forge: Where it is forked.
        log: What it writes goes there.
        told: Makes the message of a failure.
    """

    def __init__(self, oracle: Oracle, forge: Forge, log: Path, told: Callable[[str], str]) -> None:
        self._oracle, self._forge, self._log, self._told = oracle, forge, log, told
        self._child: Child | None = None

    def ensure(self, faults: str, keep_last: int | None) -> None:
        """Have one at work; another one than before when it is to have faults or to remove something."""
        if faults or keep_last is not None:
            self.kill()
        if self.pid() is not None:
            return
        oracle = self._oracle
        StagingFolder.create(STAGING_DIR, JOB, oracle.storage)
        arguments = ["--staging", str(oracle.staging), "--storage", str(oracle.storage), "--job", JOB]
        arguments += ["--events", str(oracle.events_path), "--linger-seconds", "60"]
        if keep_last is not None:
            arguments += ["--retention", RetentionSpec(keep_last=keep_last).model_dump_json()]
        child = self._forge.fork("drain", {"arguments": arguments, "faults": faults}, log=self._log)
        self._child = child

        def has_begun() -> bool:
            return self.pid() == child.pid or child.poll() is not None

        wait_until(has_begun, PATIENCE_SECONDS, self._told("the drain has its lock"), every_seconds=0.001)
        assert child.poll() in (None, -signal.SIGKILL), self._told(f"the drain ended with {child.poll()}")

    def end(self, ending: str) -> bool:
        """Let it come to the given end, now that all ranks are gone; True: it has closed down on its own."""
        child = self._child
        if child is None or self.pid() != child.pid or ending == "is killed":
            self.kill()
        elif ending == "stays":

            def has_nothing_to_do() -> bool:
                return self._is_idle() or child.poll() is not None

            wait_until(has_nothing_to_do, PATIENCE_SECONDS, self._told("the drain has nothing left to do"))
        else:
            StagingFolder(self._oracle.staging).announce_end()
            self._child = None
            return child.wait(PATIENCE_SECONDS) == 0
        return False

    def kill(self) -> None:
        """SIGKILL it, and one that a rank has started since ours was dead."""
        if self._child is not None:
            self._child.kill()
            self._child = None
        while (pid := self.pid()) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            wait_until(partial(self._is_not, pid), PATIENCE_SECONDS, "the drain dies")

    def _is_not(self, pid: int) -> bool:
        return self.pid() != pid

    def pid(self) -> int | None:
        """Return who is at work, ours or another one; None: nobody."""
        return holder_pid(self._oracle.staging / "drain.lock")

    def _is_idle(self) -> bool:
        with self._oracle.folder() as folder:
            snapshots = folder.scan().values()
            return all(s.drained or not s.persist for s in snapshots if s.complete) and not folder.reports()
