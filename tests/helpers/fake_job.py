"""Stands in for `surefoot run` where only the demo is tested: real processes that step, die and start again, no torch.

python fake_job.py SPEC BEHAVIOUR
    good        a killed rank is replaced within 0.1 s, from one step earlier
    gives-up    exits 1 when a rank dies
    hangs       does nothing more when a rank dies
    too-short   ends well before anybody could kill a rank
    leaves      as good, but its staging folder stays
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from helpers.checkpoints import commit
from surefoot.checkpoint.attempts import AttemptLog, Source, StartsFrom
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.staging_folder import staging_folder_path
from surefoot.checkpoint.store import LocalStore
from surefoot.events import CheckpointCommitted, JsonlSink, StepCompleted
from surefoot.processes import set_parent_death_signal
from surefoot.progress import Phase, ProgressPage, progress_path
from surefoot.spec import JobSpec, load_spec

STEP_SECONDS = 0.01


def rank_main(spec: JobSpec, staging: Path, rank: int, attempt: int, start_step: int) -> None:
    """Complete steps until the job's last one."""
    assert spec.recipe is not None
    page, sink = ProgressPage.create(progress_path(staging, rank)), JsonlSink(spec.events_path)
    page.write(attempt=attempt, step=start_step, start_step=start_step, phase=Phase.STEP)
    for step in range(start_step + 1, spec.recipe.steps + 1):
        time.sleep(STEP_SECONDS)
        page.write(attempt=attempt, step=step, start_step=start_step, phase=Phase.STEP)
        if rank == 0:
            loss = 8 - 4 * step / spec.recipe.steps
            sink.emit(
                StepCompleted(
                    job=spec.job,
                    attempt=attempt,
                    step=step,
                    updates=step,
                    epoch=0,
                    loss=loss,
                    learning_rate=0.1,
                    applied=True,
                    num_samples=1,
                    num_tokens=10,
                    step_seconds=(STEP_SECONDS,),
                )
            )


def start_ranks(spec: JobSpec, staging: Path, attempt: int, start_step: int) -> dict[int, int]:
    """Claim the attempt and fork the ranks; return rank by pid."""
    source = Source.STAGED if start_step else Source.SEED
    AttemptLog(LocalStore(spec.storage / spec.job)).claim(
        after=attempt - 1, starts_from=StartsFrom(attempt=attempt - 1, step=start_step, source=source),
        cause="fake", world_size=spec.nproc_per_node, host="box", started_at=datetime.now(UTC),
    )  # fmt: skip
    ranks = {}
    for rank in range(spec.nproc_per_node):
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            set_parent_death_signal()
            rank_main(spec, staging, rank, attempt, start_step)
            os._exit(0)
        ranks[pid] = rank
    return ranks


def restart(spec: JobSpec, staging: Path, ranks: dict[int, int], behaviour: str) -> dict[int, int]:
    """Do what `behaviour` says after the death of a rank."""
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if behaviour == "gives-up":
        sys.exit(1)
    if behaviour == "hangs":
        signal.pause()
    page = ProgressPage.open(progress_path(staging, 0)).read()
    assert page is not None
    return start_ranks(spec, staging, attempt=2, start_step=page.step - 1)


def main(spec_file: str, behaviour: str) -> None:
    """Be the launcher."""
    spec = load_spec(Path(spec_file))
    staging = staging_folder_path(spec.checkpoint.staging_dir, spec.job, spec.storage)
    staging.mkdir(parents=True)
    spec.events_path.parent.mkdir(parents=True)
    # as the real one on request: stop, clean up, exit 75; its ranks die with it
    signal.signal(signal.SIGTERM, lambda *_: (shutil.rmtree(staging), os._exit(75)))
    if behaviour != "too-short":
        ranks = start_ranks(spec, staging, attempt=1, start_step=0)
        commit(spec.storage / spec.job, CheckpointId(1, 5))
        JsonlSink(spec.events_path).emit(
            CheckpointCommitted(job=spec.job, attempt=1, step=5, world_size=2, num_bytes=1, write_seconds=0.1)
        )
        while ranks:
            pid, status = os.wait()
            ranks.pop(pid)
            if status:
                ranks = restart(spec, staging, ranks, behaviour)
    if behaviour != "leaves":
        shutil.rmtree(staging)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
