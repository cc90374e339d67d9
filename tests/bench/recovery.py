"""Kill a rank with SIGKILL; how long until every rank has completed its next optimizer step?

The built-in recipe (a 4.2M-parameter Llama, 2 ranks, gloo) under Surefoot's launcher and, beside it, the same script
under plain torchrun (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which its restarts hang now and then). The two run
in turns, never at once.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.report import Target, percentile, publish
from surefoot.checkpoint.staging_folder import staging_folder_path
from surefoot.events import AttemptStarted, RanksRestarted, read_events
from surefoot.processes import kill_job_processes
from surefoot.progress import Phase, Progress, ProgressPage, progress_path
from surefoot.spec import JobSpec, parse_spec

NUM_RANKS = 2
STEPS_BETWEEN_KILLS = 4
LIMIT_SECONDS = 60.0
WORK = Path("build/bench/recovery")

STAGES = [
    # name, from mark, to mark; "kill" is the moment of the signal, the rest are timeline marks
    ("detect", "kill", "detect"),
    ("kill the others", "detect", "killed"),
    ("rendezvous", "killed", "rendezvous"),
    ("fork", "rendezvous", "user_code"),
    ("build", "user_code", "attach"),
    ("process group", "attach", "host"),
    ("buckets", "host", "replicated"),
    ("load", "replicated", "loaded"),
    ("claim", "loaded", "claimed"),
    ("first step", "claimed", "next step"),
]


@dataclass
class Recovery:
    """One kill."""

    killed_at: float
    attempt: int
    next_step_at: float | None = None
    steps_lost: int | None = None

    @property
    def seconds(self) -> float:
        assert self.next_step_at is not None
        return self.next_step_at - self.killed_at


@dataclass
class Runner:
    """One way of running the job."""

    name: str
    spec: JobSpec
    command: list[str]
    recoveries: list[Recovery] = field(default_factory=list)

    @property
    def staging(self) -> Path:
        return staging_folder_path(self.spec.checkpoint.staging_dir, self.spec.job, self.spec.storage)

    def run(self, num_kills: int, chance: random.Random) -> None:
        """Start the job, kill random ranks, end it."""
        environment = os.environ | self.spec.to_environment()
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        environment["SUREFOOT_JOB_KEY"] = self.staging.name
        log = (WORK / f"{self.name}.log").open("ab")
        process = subprocess.Popen(self.command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            last_attempt = max((r.attempt for r in self.recoveries), default=0)
            for _ in range(num_kills):
                recovery = self._one_kill(chance, last_attempt)
                self.recoveries.append(recovery)
                last_attempt = recovery.attempt
                if recovery.next_step_at is None:
                    break
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kill_job_processes(self.staging.name)
            log.close()

    def _one_kill(self, chance: random.Random, last_attempt: int) -> Recovery:
        pages = self._pages()
        before = wait_for(pages, lambda p: p.attempt > last_attempt and p.step >= p.start_step + STEPS_BETWEEN_KILLS)
        assert before is not None, f"{self.name}: no progress before the kill; see {WORK}/{self.name}.log"
        # At any moment of a step, not only at its beginning.
        time.sleep(chance.uniform(0.0, 0.2))
        victim = pages[chance.randrange(NUM_RANKS)].read()
        recovery = Recovery(time.monotonic(), victim.attempt)
        os.kill(victim.pid, signal.SIGKILL)
        after = wait_for(pages, lambda p: p.attempt > victim.attempt and p.step > p.start_step)
        if after is not None:
            recovery.next_step_at = max(page.monotonic_seconds for page in after)
            recovery.steps_lost = victim.step - after[0].start_step
        return recovery

    def _pages(self) -> list[ProgressPage]:
        deadline = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline:
            try:
                return [ProgressPage.open(progress_path(self.staging, rank)) for rank in range(NUM_RANKS)]
            except FileNotFoundError:
                time.sleep(0.01)
        raise TimeoutError(f"{self.name} did not start; see {WORK}/{self.name}.log")


def wait_for(pages: list[ProgressPage], condition: Any) -> list[Progress] | None:
    """Poll every rank's page until the condition holds on all; each as it was when it first held."""
    found: dict[int, Progress] = {}
    deadline = time.monotonic() + LIMIT_SECONDS
    while len(found) < len(pages) and time.monotonic() < deadline:
        for rank, page in enumerate(pages):
            progress = page.read()
            if rank not in found and progress and progress.phase is Phase.STEP and condition(progress):
                found[rank] = progress
        time.sleep(0.0005)
    return [found[rank] for rank in range(len(pages))] if len(found) == len(pages) else None


def breakdown(runner: Runner) -> dict[str, float]:
    """Median seconds of each stage, from the events' timelines."""
    events, _ = read_events(runner.spec.events_path)
    starts = {e.attempt: e for e in events if isinstance(e, AttemptStarted)}
    restarts = [e for e in events if isinstance(e, RanksRestarted)]
    stages: dict[str, list[float]] = {name: [] for name, _, _ in STAGES}
    for recovery in runner.recoveries:
        start = starts.get(recovery.attempt + 1)
        if start is None or recovery.next_step_at is None:
            continue
        marks = {m.name: m.monotonic_seconds for m in start.timeline}
        restart = next((r for r in restarts if recovery.killed_at < r.monotonic_seconds < recovery.next_step_at), None)
        marks |= {m.name: m.monotonic_seconds for m in (restart.timeline if restart else ())}
        marks |= {"kill": recovery.killed_at, "next step": recovery.next_step_at}
        for name, begin, end in STAGES:
            if begin in marks and end in marks:
                stages[name].append(marks[end] - marks[begin])
    return {name: statistics.median(values) for name, values in stages.items() if values}


def row(runner: Runner) -> dict[str, Any]:
    good = [r for r in runner.recoveries if r.next_step_at is not None]
    seconds = [r.seconds for r in good]
    return {
        "launcher": runner.name,
        "kills": len(runner.recoveries),
        "recovered": len(good),
        "median s": statistics.median(seconds) if seconds else float("nan"),
        "p95 s": percentile(seconds, 0.95) if seconds else float("nan"),
        "max s": max(seconds, default=float("nan")),
        "steps lost (max)": max((r.steps_lost for r in good if r.steps_lost is not None), default=0),
    }


def make_runner(name: str) -> Runner:
    spec = parse_spec(
        {
            "job": f"bench-{name}",
            "entrypoint": "-m surefoot_worker.recipe",
            "nproc_per_node": NUM_RANKS,
            "threads_per_rank": 1,
            "storage": str((WORK / "checkpoints").absolute()),
            "run_dir": str((WORK / "run").absolute()),
            "checkpoint": {"save_every_seconds": 5},
            "restart": {"max_restarts": 1000},
            "recipe": {"steps": 100_000, "global_batch_size": 8, "sequence_length": 128},
        }
    )
    path = WORK / f"{name}.json"
    path.write_text(spec.model_dump_json(exclude_unset=True))
    if name == "surefoot":
        command = [sys.executable, "-m", "surefoot_worker.launcher", str(path)]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
        command += ["--max-restarts=1000", "-m", "surefoot_worker.recipe"]
    return Runner(name, spec, command)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of Surefoot's ranks (default %(default)s)")
    parser.add_argument("--torchrun-kills", type=int, default=6, help="of torchrun's ranks (default %(default)s)")
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    chance = random.Random(5)
    ours, torchrun = make_runner("surefoot"), make_runner("torchrun")
    for _ in range(options.turns):
        ours.run(options.kills // options.turns, chance)
        torchrun.run(options.torchrun_kills // options.turns, chance)
    stages = breakdown(ours)
    rows = [row(ours) | {"breakdown s": " ".join(f"{name} {s:.3f}" for name, s in stages.items())}]
    rows += [row(torchrun) | {"breakdown s": ""}]
    medians = [r["median s"] for r in rows]
    publish(
        "recovery",
        rows,
        [
            Target("median seconds from SIGKILL to the next step on all ranks", medians[0], 0.3, "lower"),
            Target("share of kills recovered", rows[0]["recovered"] / rows[0]["kills"], 1.0, "higher"),
            Target("ratio to plain torchrun", medians[0] / medians[1], 0.2, "lower"),
        ],
    )


if __name__ == "__main__":
    main()
