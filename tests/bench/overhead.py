"""What does Surefoot cost while nothing goes wrong? Tokens per second with everything on, beside the same loop bare.

The recipe under the whole stack (services, per-step snapshots, checkpoints every so many steps) and the same loop with
a no-op session (`noop_recipe.py`) under torchrun run on the same two cores in turns of some steps: while one runs, the
processes of the other are stopped (SIGSTOP). Each pair of turns gives one ratio; slow drifts of the machine cancel.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import Target, publish
from surefoot.checkpoint.staging_folder import staging_folder_path
from surefoot.cli.client import ApiClient
from surefoot.cli.demo_stack import DemoStack
from surefoot.events import StepCompleted, read_events
from surefoot.processes import JOB_KEY_ENVIRONMENT_KEY, find_job_processes, kill_job_processes
from surefoot.spec import JobSpec, parse_spec

NUM_RANKS = 2
WORK = Path("build/bench/overhead").absolute()
NOOP = Path(__file__).with_name("noop_recipe.py")
NOOP_KEY = "surefoot-bench-overhead-noop"
LIMIT_SECONDS = 120.0
POLL_SECONDS = 0.05
"""The harness uses the same two cores: it reads only what is new, and seldom."""
RECIPE = {"sequence_length": 128, "global_batch_size": 16, "steps": 100_000}
"""The model and the batch of `make demo`."""


@dataclass(frozen=True)
class Side:
    """One of the two loops.

    Attributes:
        name: For the report.
        key: Job key in the environment of its processes.
        step_ends: Returns CLOCK_MONOTONIC at the end of every step so far.
    """

    name: str
    key: str
    step_ends: Callable[[], list[float]]

    def signal(self, number: signal.Signals) -> None:
        for pid in find_job_processes(self.key):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def wait_for_steps(self, num_steps: int) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while len(self.step_ends()) < num_steps:
            assert time.monotonic() < deadline, f"{self.name}: no {num_steps} steps within {LIMIT_SECONDS:.0f} s"
            time.sleep(POLL_SECONDS)

    def turn(self, num_steps: int) -> float:
        """Run that many steps; return seconds per step. The first one, in which it is woken up, is not counted."""
        self.signal(signal.SIGCONT)
        done = len(self.step_ends())
        self.wait_for_steps(done + num_steps + 1)
        self.signal(signal.SIGSTOP)
        ends = self.step_ends()[done : done + num_steps + 1]
        return (ends[-1] - ends[0]) / num_steps


def spec(save_every_steps: int) -> JobSpec:
    return parse_spec(
        {
            "job": "bench-overhead",
            "entrypoint": "-m surefoot_worker.recipe",
            "nproc_per_node": NUM_RANKS,
            "threads_per_rank": 1,
            "storage": str(WORK / "home" / "checkpoints"),
            "run_dir": str(WORK / "home" / "run" / "jobs"),
            "checkpoint": {"save_every_seconds": None, "save_every_steps": save_every_steps},
            "hang": {"enabled": False},
            "recipe": RECIPE | {"cache_dir": str(Path(".surefoot/data").absolute())},
        }
    )


def surefoot_side(job: JobSpec) -> Side:
    ends: list[float] = []
    offset = 0

    def step_ends() -> list[float]:
        nonlocal offset
        events, offset = read_events(job.events_path, offset)
        ends.extend(event.monotonic_seconds for event in events if isinstance(event, StepCompleted))
        return ends

    key = staging_folder_path(job.checkpoint.staging_dir, job.job, job.storage).name
    return Side("surefoot", key, step_ends)


def noop_side() -> Side:
    steps = WORK / "noop.steps"

    def step_ends() -> list[float]:
        return [float(line) for line in steps.read_text().splitlines()] if steps.exists() else []

    return Side("no-op session", NOOP_KEY, step_ends)


@contextmanager
def noop_running(job: JobSpec) -> Any:
    environment = os.environ | job.to_environment() | {"OMP_NUM_THREADS": "1", JOB_KEY_ENVIRONMENT_KEY: NOOP_KEY}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    with (WORK / "noop.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, str(NOOP), str(WORK / "noop.steps")], env=environment, stdout=log, stderr=log
        )
    try:
        yield
    finally:
        kill_job_processes(NOOP_KEY)
        process.wait()


def measure(sides: tuple[Side, Side], turns: int, steps: int) -> list[tuple[float, float]]:
    for side in sides:
        side.signal(signal.SIGCONT)
    for side in sides:
        side.wait_for_steps(5)  # both are past their warm-up; the pages of staging are touched
    for side in sides:
        side.signal(signal.SIGSTOP)
    pairs = []
    for turn in range(turns):
        # Who goes first changes, so that what the first leaves behind (a save being written) is shared out.
        order = sides if turn % 2 == 0 else sides[::-1]
        seconds = {side.name: side.turn(steps) for side in order}
        pairs.append((seconds[sides[0].name], seconds[sides[1].name]))
        print(f"turn {turn + 1}: {pairs[-1][0]:.4f} s a step with, {pairs[-1][1]:.4f} s without", flush=True)
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=10, help="pairs of turns (default %(default)s)")
    parser.add_argument("--steps", type=int, default=25, help="steps of a turn (default %(default)s)")
    parser.add_argument("--save-every-steps", type=int, default=25, help="checkpoint interval (default %(default)s)")
    options = parser.parse_args()
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    job = spec(options.save_every_steps)
    sides = (surefoot_side(job), noop_side())
    with DemoStack(WORK / "home") as stack:
        running = stack.wait_until_ready()
        with ApiClient(running.urls["api"], running.token) as api, noop_running(job):
            api.post("jobs", body={"spec": job.model_dump(mode="json", exclude_unset=True)})
            try:
                pairs = measure(sides, options.turns, options.steps)
            finally:
                sides[0].signal(signal.SIGCONT)
    report(pairs, options)


def report(pairs: list[tuple[float, float]], options: argparse.Namespace) -> None:
    tokens = int(RECIPE["sequence_length"]) * int(RECIPE["global_batch_size"])
    ratios = sorted(without / with_ for with_, without in pairs)
    quarter = len(ratios) // 4
    rows = [
        {"loop": name, "turns": len(pairs), "steps a turn": options.steps, "tokens/s": tokens / statistics.median(s)}
        for name, s in (("surefoot, whole stack", [p[0] for p in pairs]), ("no-op session", [p[1] for p in pairs]))
    ]
    rows[0] |= {
        "ratio, median": statistics.median(ratios),
        "ratio, quartiles": f"{ratios[quarter]:.3f} .. {ratios[-1 - quarter]:.3f}",
        "ratio, min..max": f"{ratios[0]:.3f} .. {ratios[-1]:.3f}",
        "checkpoint every": f"{options.save_every_steps} steps",
    }
    name = "tokens/s with everything on, as a part of the bare loop's"
    publish("overhead", rows, [Target(name, statistics.median(ratios), 0.95, "higher")])


if __name__ == "__main__":
    main()
