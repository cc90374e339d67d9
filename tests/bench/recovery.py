"""Kill a rank with SIGKILL; how long until every rank has completed its next optimizer step?

The built-in recipe (a Llama-type model, 2 ranks, gloo) under Surefoot's launcher and, beside it, the same script under
plain torchrun (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which its restarts hang now and then). They run in turns,
never at once. `small` has 0.8M parameters and steps of some 50 ms; `demo` is the model of `make demo`, whose step alone
takes about 0.3 s on two cores. The next step is part of what is measured.
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
from surefoot.events import AttemptStarted, RanksRestarted, StepCompleted, read_events
from surefoot.processes import JOB_KEY_ENVIRONMENT_KEY, kill_job_processes
from surefoot.progress import Phase, Progress, ProgressReader, progress_path
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
    ("staging", "loaded", "prepared"),
    ("claim", "prepared", "claimed"),
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
    model: str
    spec: JobSpec
    command: list[str]
    recoveries: list[Recovery] = field(default_factory=list)

    @property
    def staging(self) -> Path:
        return staging_folder_path(self.spec.checkpoint.staging_dir, self.spec.job, self.spec.storage)

    @property
    def log_path(self) -> Path:
        return WORK / f"{self.name}-{self.model}.log"

    def median_step_seconds(self) -> float:
        events, _ = read_events(self.spec.events_path)
        return statistics.median(max(e.step_seconds) for e in events if isinstance(e, StepCompleted))

    def run(self, num_kills: int, chance: random.Random) -> None:
        """Start the job, kill random ranks, end it."""
        environment = os.environ | self.spec.to_environment()
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        # To find torchrun's processes at the end; not the job's own key, by which the drain sweeps.
        environment[JOB_KEY_ENVIRONMENT_KEY] = f"{self.staging.name}-bench"
        log = self.log_path.open("ab")
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
            for key in (self.staging.name, f"{self.staging.name}-bench"):
                kill_job_processes(key)
            log.close()

    def _one_kill(self, chance: random.Random, last_attempt: int) -> Recovery:
        pages = [ProgressReader(progress_path(self.staging, rank)) for rank in range(NUM_RANKS)]
        before = wait_for(pages, lambda p: p.attempt > last_attempt and p.step >= p.start_step + STEPS_BETWEEN_KILLS)
        assert before is not None, f"{self.name}: no progress before the kill; see {self.log_path}"
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


def wait_for(pages: list[ProgressReader], condition: Any) -> list[Progress] | None:
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


MODELS: dict[str, dict[str, Any]] = {
    "small": {
        "model": {
            "vocab_size": 2048,
            "hidden_size": 128,
            "intermediate_size": 344,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
        },
        "sequence_length": 64,
        "global_batch_size": 8,
    },
    "demo": {"sequence_length": 256, "global_batch_size": 8},
}


def row(runner: Runner) -> dict[str, Any]:
    good = [r for r in runner.recoveries if r.next_step_at is not None]
    seconds = [r.seconds for r in good]
    return {
        "model": runner.model,
        "launcher": runner.name,
        "kills": len(runner.recoveries),
        "recovered": len(good),
        "median s": statistics.median(seconds) if seconds else float("nan"),
        "p95 s": percentile(seconds, 0.95) if seconds else float("nan"),
        "max s": max(seconds, default=float("nan")),
        "normal step s": runner.median_step_seconds(),
        "steps lost (max)": max((r.steps_lost for r in good if r.steps_lost is not None), default=0),
    }


def make_runner(name: str, model: str) -> Runner:
    recipe = MODELS[model] | {"steps": 100_000, "cache_dir": str(Path(".surefoot/data").absolute())}
    spec = parse_spec(
        {
            "job": f"bench-{name}-{model}",
            "entrypoint": "-m surefoot_worker.recipe",
            "nproc_per_node": NUM_RANKS,
            "threads_per_rank": 1,
            "storage": str((WORK / "checkpoints").absolute()),
            "run_dir": str((WORK / "run").absolute()),
            "checkpoint": {"save_every_seconds": 5},
            "restart": {"max_restarts": 1000},
            "recipe": recipe,
        }
    )
    path = WORK / f"{name}-{model}.json"
    path.write_text(spec.model_dump_json(exclude_unset=True))
    if name == "surefoot":
        command = [sys.executable, "-m", "surefoot_worker.launcher", str(path)]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
        command += ["--max-restarts=1000", "-m", "surefoot_worker.recipe"]
    return Runner(name, model, spec, command)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of Surefoot's ranks, per model (default %(default)s)")
    parser.add_argument("--torchrun-kills", type=int, default=4, help="of torchrun's ranks (default %(default)s)")
    parser.add_argument("--turns", type=int, default=2, help="each runs in so many turns (default %(default)s)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    chance = random.Random(5)
    rows: list[dict[str, Any]] = []
    for model in options.models:
        ours, torchrun = make_runner("surefoot", model), make_runner("torchrun", model)
        for _ in range(options.turns):
            ours.run(options.kills // options.turns, chance)
            torchrun.run(options.torchrun_kills // options.turns, chance)
        # Where the time goes, beside the total it makes up.
        stages = {f"{name} s": seconds for name, seconds in breakdown(ours).items()}
        rows += [row(ours) | stages, row(torchrun) | dict.fromkeys(stages, "")]
    median, peer_median = rows[0]["median s"], rows[1]["median s"]
    name = rows[0]["model"]
    mine = [r for r in rows if r["launcher"] == "surefoot"]
    recovered = sum(r["recovered"] for r in mine) / sum(r["kills"] for r in mine)
    publish(
        "recovery",
        rows,
        [
            Target(f"{name}: median seconds, SIGKILL to next step on all ranks", median, 0.3, "lower"),
            Target("share of kills recovered", recovered, 1.0, "higher"),
            Target(f"{name}: ratio to plain torchrun", median / peer_median, 0.2, "lower"),
        ],
    )


if __name__ == "__main__":
    main()
