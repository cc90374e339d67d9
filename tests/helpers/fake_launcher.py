"""Stands in for a launcher where only the worker service is tested: no torch, no ranks; events, records and signals.

python fake_launcher.py SPEC --cause TEXT --die-with PID [--from-seed]; the spec's entrypoint says what it does:
    run        steps until it is asked to stop, then exits 75
    short      five steps, then exits 0
    fails      three steps, then exits 1 with a reason
    refuses    exits 2 before anything, as bad input does
    crashes    kills itself after its attempt began, unless two attempts were there before
    dies       kills itself before its attempt begins
    deaf       steps, lets SIGTERM pass and leaves its staging folder
    full       steps, storage has failed for 6 s at step 3 and works again when there is a file `freed`; else as run
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import types
from datetime import UTC, datetime
from pathlib import Path

from surefoot.checkpoint.attempts import AttemptLog, Source, StartsFrom
from surefoot.checkpoint.locks import LockedFile
from surefoot.checkpoint.staging_folder import staging_folder_path
from surefoot.checkpoint.store import LocalStore
from surefoot.events import (
    AttemptStarted,
    Event,
    JobFinished,
    JobState,
    JsonlSink,
    StepCompleted,
    StorageFailed,
    StorageRecovered,
)
from surefoot.processes import set_parent_death_signal
from surefoot.progress import Phase, ProgressPage, progress_path
from surefoot.runtime import StopEvent
from surefoot.spec import JobSpec, load_spec

STEP_SECONDS = 0.02


def step_event(job: str, attempt: int, step: int) -> StepCompleted:
    return StepCompleted(
        job=job, attempt=attempt, rank=0, step=step, updates=step, epoch=0, loss=1.0 / step, learning_rate=0.1,
        applied=True, num_samples=1, step_seconds=(STEP_SECONDS,),
    )  # fmt: skip


class FakeLauncher:
    def __init__(self, spec: JobSpec, cause: str, from_seed: bool) -> None:
        self.spec, self.cause, self.from_seed = spec, cause, from_seed
        self.sink = JsonlSink(spec.events_path)
        self.staging = staging_folder_path(spec.checkpoint.staging_dir, spec.job, spec.storage)
        self.asked = StopEvent()
        self.output = spec.job_run_dir / "logs" / "rank-00000.out"

    def emit(self, event: Event) -> None:
        self.sink.emit(event)

    def say(self, text: str) -> None:
        with self.output.open("a") as file:
            file.write(text)

    def claim(self) -> tuple[int, int]:
        attempts = AttemptLog(LocalStore(self.spec.storage / self.spec.job))
        newest = attempts.newest()
        after = 0 if newest is None else newest.attempt
        step = 0 if self.from_seed or newest is None else newest.starts_from.step + 1
        source = Source.STAGED if step else Source.SEED
        attempts.claim(
            after=after, starts_from=StartsFrom(attempt=after if step else 0, step=step, source=source),
            cause=self.cause, world_size=1, host=os.uname().nodename, started_at=datetime.now(UTC),
        )  # fmt: skip
        return after + 1, step

    def run(self, what: str) -> int:
        self.staging.mkdir(parents=True, exist_ok=True)
        lock = LockedFile.open(self.staging / "launcher.lock", create=True)
        assert lock.try_own() is None
        self.say(f"--- surefoot: rank 0 starts ---\n{self.cause}\n")
        attempt, first = self.claim()
        page = ProgressPage.create(progress_path(self.staging, 0))
        last = {"short": 5, "fails": 3}.get(what, 10**9)
        for step in range(first + 1, first + last + 1):
            if self.asked.wait(STEP_SECONDS):
                return self.finish(75, JobState.STOPPED, "stopped on request")
            page.write(attempt=attempt, step=step, start_step=first, phase=Phase.STEP)
            self.emit(step_event(self.spec.job, attempt, step))
            if what == "full":
                self.be_full(step)
            if step == first + 1:
                self.start(attempt, first)
                if what == "crashes" and attempt < 3:
                    os.kill(os.getpid(), signal.SIGKILL)
        self.say("no line break at the end")
        if what == "fails":
            return self.finish(1, JobState.FAILED, "rank 0 raised ValueError: bad luck\nTraceback ...")
        return self.finish(0, JobState.SUCCEEDED, "every rank finished")

    def be_full(self, step: int) -> None:
        if step == 3:
            reason = "ENOSPC: No space left on device"
            for number, seconds in enumerate((-6.0, -5.9, 0.0), 1):
                self.emit(
                    StorageFailed(
                        job=self.spec.job, operation="write a shard", reason=reason, num_failures=number,
                        monotonic_seconds=time.monotonic() + seconds,
                    )
                )  # fmt: skip
        elif (freed := self.spec.job_run_dir / "freed").exists():
            freed.unlink()
            self.emit(StorageRecovered(job=self.spec.job, seconds=6.3, num_failures=3))

    def start(self, attempt: int, first: int) -> None:
        event = AttemptStarted(
            job=self.spec.job, attempt=attempt, rank=0, world_size=1, from_attempt=max(0, attempt - 1),
            from_step=first, source="SEED", cause=self.cause, total_steps=1000,
        )  # fmt: skip
        self.emit(event)
        self.say(f"attempt {attempt} runs\n")

    def finish(self, code: int, state: JobState, reason: str) -> int:
        self.emit(JobFinished(job=self.spec.job, attempt=1, state=state, reason=reason, restarts=0))
        for path in sorted(self.staging.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        self.staging.rmdir()
        return code


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("spec", type=Path)
    parser.add_argument("--cause", required=True)
    parser.add_argument("--die-with", type=int, required=True)
    parser.add_argument("--from-seed", action="store_true")
    arguments = parser.parse_args()
    set_parent_death_signal(arguments.die_with)
    spec = load_spec(arguments.spec)
    launcher = FakeLauncher(spec, arguments.cause, arguments.from_seed)

    def stop(number: int, frame: types.FrameType | None) -> None:
        launcher.asked.set()

    signal.signal(signal.SIGTERM, signal.SIG_IGN if spec.entrypoint == "deaf" else stop)
    if spec.entrypoint == "refuses":
        sys.stderr.write("surefoot: error: nproc_per_node: too many\n")
        return 2
    if spec.entrypoint == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    return launcher.run(spec.entrypoint)


if __name__ == "__main__":
    sys.exit(main())
