"""The drain: a small process that makes a job's snapshots durable and outlives everybody else of the job.

    python -m surefoot.checkpoint.drain --staging DIR --storage DIR --job NAME --events FILE

Rank 0 or the launcher starts it (`drain_start`); it runs in a session of its own. A second one exits at once
with 0. When no rank and no launcher has been there for a moment it salvages the newest snapshot, removes the
staging folder and exits.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from surefoot.checkpoint.drain_prune import RetentionRules
from surefoot.checkpoint.drain_retry import Retried
from surefoot.checkpoint.drain_work import Drain
from surefoot.checkpoint.locks import LockedFile, holder_pid
from surefoot.checkpoint.staging_folder import StagingFolder
from surefoot.checkpoint.store import LocalStore
from surefoot.errors import EXIT_FAILED, EXIT_OK
from surefoot.events import Event, JsonlSink
from surefoot.processes import kill_job_processes

__all__ = ["Drain", "DrainLoop", "main"]

_OTHERS_POLL_SECONDS = 0.1

_log = logging.getLogger("surefoot.drain")


class DrainLoop:
    """When to drain: when woken, every second, again after an error, and once more when everybody has left.

    Args:
        drain: Does the work.
        staging: The folder that the ranks fill.
        is_current: False when the folder was deleted or replaced under us: then there is nothing left to do.
        linger_seconds: How long nobody may be there before the folder is closed down; spans a restart by
            hand.
        poll_seconds: Longest time between two looks.
        max_delay_seconds: Longest time between two tries while storage fails (the first is 0.1 s, then
            doubling).
        give_up_seconds: With nobody there, how long storage may fail before the loop ends and leaves the
            folder as it is for the next start.
        others_seconds: With nobody there, how long the drains of other nodes may take for their parts of what is
            salvaged. All of this node is on storage by then, so they can complete it without us.
        monotonic: CLOCK_MONOTONIC in seconds.
    """

    def __init__(
        self,
        drain: Drain,
        staging: StagingFolder,
        *,
        is_current: Callable[[], bool],
        linger_seconds: float = 2.0,
        poll_seconds: float = 1.0,
        max_delay_seconds: float = 30.0,
        give_up_seconds: float = 600.0,
        others_seconds: float = 60.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drain = drain
        self._staging = staging
        self._is_current = is_current
        self._linger_seconds = linger_seconds
        self._poll_seconds = poll_seconds
        self._give_up_seconds = give_up_seconds
        self._others_seconds = others_seconds
        self._monotonic = monotonic
        self._retried = [
            Retried(work, max_delay_seconds, monotonic, drain.trouble)
            for work in (drain.handle_reports, drain.work, drain.salvage, drain.prune)
        ]
        self._reports, self._work, self._salvage, self._prune = self._retried
        self._others_since: float | None = None

    def run(self) -> int:
        """Run until the job is over. Returns the exit code. Call it in the main thread, holding `drain.lock`."""
        alone_since: float | None = None
        while self._is_current():
            self._reports.call()
            self._work.call()
            self._prune.call()
            now = self._monotonic()
            if self._is_somebody_there():
                alone_since = self._others_since = None
                self._salvage.drop()
            else:
                alone_since = now if alone_since is None else alone_since
                lingered = now - alone_since >= self._linger_seconds or self._staging.is_end_announced()
                if lingered and self._close_down():
                    return EXIT_OK
                if now - alone_since >= self._give_up_seconds:
                    _log.error("giving up; %s is left as it is for the next start", self._staging.path)
                    return EXIT_FAILED
            self._wait(alone_since)
        _log.warning("%s is gone, nothing is left to do", self._staging.path)
        return EXIT_OK

    def _wait(self, alone_since: float | None) -> None:
        timeout_seconds = self._poll_seconds
        now = self._monotonic()
        for retried in self._retried:
            if retried.num_failures:
                timeout_seconds = min(timeout_seconds, retried.next_try - now)
        if alone_since is not None and now < alone_since + self._linger_seconds:
            timeout_seconds = min(timeout_seconds, alone_since + self._linger_seconds - now)
        if self._drain.waits_for_others:
            # Nothing wakes this drain when the one of another node is done.
            timeout_seconds = min(timeout_seconds, _OTHERS_POLL_SECONDS)
        self._staging.wait_for_wake(max(0.0, timeout_seconds))

    def _is_somebody_there(self) -> bool:
        if self._staging.try_take_session():
            self._staging.release_session()
            return False
        return True

    def _close_down(self) -> bool:
        """Salvage, then end what is left of the job and remove the folder, unless somebody came; False: go on.

        The session lock is not held while writing or pruning: whoever starts the job again meanwhile shall not
        wait for a disk.
        """
        before = self._content()
        if not self._salvage.call() or self._is_waiting_for_others():
            return False
        self._prune.call()  # should it fail, the job's next drain does it
        if not self._staging.try_take_session():
            return False
        if self._content() != before:
            self._staging.release_session()
            return False
        self._kill_leftovers()
        self._staging.remove()
        return True

    def _is_waiting_for_others(self) -> bool:
        if not self._drain.waits_for_others:
            return False
        now = self._monotonic()
        self._others_since = now if self._others_since is None else self._others_since
        if now - self._others_since < self._others_seconds:
            return True
        _log.warning("the parts of other nodes are still missing; they complete the last snapshot, or nobody does")
        return False

    def _kill_leftovers(self) -> None:
        """End what a user's script started and nobody else ends once ranks and launcher are dead."""
        launcher = holder_pid(self._staging.path / "launcher.lock")
        try:
            killed = kill_job_processes(self._staging.path.name, keep=() if launcher is None else (launcher,))
        except OSError as error:  # also TimeoutError: the memory of the snapshots is not theirs to keep
            _log.error("processes of the job are left: %s", error)
            return
        if killed:
            _log.warning("killed processes that outlived the job: %s", ", ".join(map(str, killed)))

    def _content(self) -> set[tuple[str, int]]:
        return {(part.buffer.path.name, part.header.sequence) for part in self._staging.parts()}


class _LateSink:
    """A `JsonlSink` that is opened at the first event: saves become durable even where events cannot go."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sink: JsonlSink | None = None

    def emit(self, event: Event) -> None:
        """Append the event as one line; raises OSError."""
        if self._sink is None:
            self._sink = JsonlSink(self._path)
        self._sink.emit(event)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the drain of one job; the composition root."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    staging = StagingFolder(options.staging)
    staging.sweep()
    try:
        lock = LockedFile.open(options.staging / "drain.lock", create=True)
    except FileNotFoundError:
        _log.warning("%s is not there: closed down already, with all in it durable", options.staging)
        return EXIT_OK
    if not lock.try_exclusive() or not lock.is_current():
        _log.info("another drain is at work on %s", options.staging)
        return EXIT_OK
    store = LocalStore(options.storage / options.job)
    try:
        removed = store.remove_debris()
    except OSError as error:
        _log.warning("unfinished files could not be removed: %s", error)
    else:
        _log.info("draining %s to %s; %d unfinished files removed", staging.path, store, len(removed))
    drain = Drain(
        staging=staging,
        store=store,
        sink=_LateSink(options.events),
        job=options.job,
        retention=options.retention,
    )
    loop = DrainLoop(
        drain,
        staging,
        is_current=lock.is_current,
        linger_seconds=options.linger_seconds,
        give_up_seconds=options.give_up_seconds,
        others_seconds=options.others_seconds,
    )
    return loop.run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m surefoot.checkpoint.drain", description="Make the staged snapshots of a job durable."
    )
    required = parser.add_argument_group("required")
    for name, kind, metavar, text in (
        ("staging", Path, "DIR", "staging folder of the job"),
        ("storage", Path, "DIR", "checkpoints go to DIR/NAME/"),
        ("job", str, "NAME", "name of the job"),
        ("events", Path, "FILE", "events are appended to it"),
    ):
        required.add_argument(f"--{name}", type=kind, required=True, metavar=metavar, help=text)
    for name, default, text in (
        ("linger-seconds", 2.0, "stay so long after the last rank (default %(default)s)"),
        ("give-up-seconds", 600.0, "then, with storage failing so long, end (default %(default)s)"),
        ("others-seconds", 60.0, "then, with parts of other nodes missing so long, end (default %(default)s)"),
    ):
        parser.add_argument(f"--{name}", type=float, default=default, metavar="S", help=text)
    parser.add_argument(
        "--retention",
        type=RetentionRules.model_validate_json,
        metavar="JSON",
        help="section checkpoint.retention of the spec: remove what it does not keep (default: remove nothing)",
    )
    return parser


def _close_inherited_descriptors() -> None:
    # Libraries in rank 0 open sockets in C without CLOEXEC: kept open here, the peer of a dead rank sees no end.
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  numbers, not paths
        if int(name) > 2:
            with suppress(OSError):  # the one that listed them
                os.close(int(name))


if __name__ == "__main__":
    _close_inherited_descriptors()
    sys.exit(main())
