"""What does a checkpoint cost, and how soon is it safe? Surefoot beside torch.save and DCP on the same model and disk.

Every contender trains the same Llama-type model (124M parameters have the shape of GPT-2; with AdamW 1.48 GB of state)
in processes of its own under torchrun, with 1 and with 2 DDP ranks, and saves every so many steps. They run in turns,
never at once, several rounds; the floors of the machine (memory copy, O_DIRECT write and fsync) are measured once per
round. Per save:

  lost     training time: from the save until it is durable and one step more, minus as many undisturbed steps
  stall    of it, the time in which the loop stood still
  durable  until the bytes are on the disk, fsynced

Extra RAM is the peak of all processes of the contender, shared memory counted once, minus that of the loop without
saves. `surefoot` saves as the others do; `surefoot+every step` also keeps a snapshot of each step in memory, as it
comes. The first save of each run warms up and is not counted. `--rss` alone: 200 saves of 20 MB, and the growth of
the processes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.checkpoint_figures import BARE, PEERS, SUREFOOT, Results, Run, SaveRecord, growth
from bench.checkpoint_memory import MemorySampler
from bench.checkpoint_report import growth_row, publish_all
from bench.report import publish
from helpers.waiting import wait_until
from surefoot.processes import find_processes

WORK = Path("build/bench/checkpoint").absolute()
KEY_VARIABLE = "BENCH_CHECKPOINT_KEY"
"""In the environment of all processes that a run starts, the drain included."""
LOOP_MODULE = "bench.checkpoint_loop"
LIMIT_SECONDS = 600.0
END_LIMIT_SECONDS = 60.0
POLL_SECONDS = 0.2


class Bench:
    """Runs contenders, one at a time.

    Args:
        options: Of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._staging = Path("/dev/shm") / f"surefoot-bench-{os.getpid()}"
        self.results = Results()

    def __enter__(self) -> Bench:
        shutil.rmtree(WORK, ignore_errors=True)
        self._staging.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._staging, ignore_errors=True)
        shutil.rmtree(WORK, ignore_errors=True)

    def run(self, contender: str, ranks: int) -> None:
        """Let one contender run once."""
        options, out = self._options, self._fresh_folder()
        module = [LOOP_MODULE, "--contender", contender, "--out", str(out), "--staging", str(self._staging)]
        module += ["--params", str(options.params), "--tokens", str(options.tokens), "--every", str(options.every)]
        # Enough steps after the last save to see it become durable.
        module += ["--steps", str(options.every * (options.saves + 2))]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        threads = max(1, options.threads // ranks)
        with MemorySampler(KEY_VARIABLE, out.name, LOOP_MODULE) as sampler:
            self._call([*command, *module], out, threads)
        run, state_bytes = read_run(out, ranks)
        first_save = run.saves[0].called_at if run.saves else run.ends[-1]
        run.held_bytes = sampler.peak(run.ends[0], first_save)
        run.memory_bytes = sampler.peak(run.ends[0], run.ends[-1])
        self.results.runs.setdefault((ranks, contender), []).append(run)
        self.results.state_bytes = state_bytes

    def measure_floors(self) -> None:
        """Measure the floors once."""
        out = self._fresh_folder()
        command = [sys.executable, "-m", "bench.checkpoint_floors", "--params", str(self._options.params)]
        command += ["--staging", str(self._staging), "--folder", str(out), "--out", str(out / "floors.json")]
        self._call(command, out, self._options.threads)
        self.results.floors.append(json.loads((out / "floors.json").read_text()))

    def measure_growth(self) -> None:
        """Save a small state many times."""
        out = self._fresh_folder()
        command = [sys.executable, "-m", "bench.checkpoint_growth", "--out", str(out), "--staging", str(self._staging)]
        self._call([*command, "--saves", str(self._options.growth_saves)], out, 1)
        self.results.num_growth_saves = self._options.growth_saves
        self.results.growth_mb = growth(json.loads((out / "growth.json").read_text()))

    def _fresh_folder(self) -> Path:
        shutil.rmtree(WORK, ignore_errors=True)
        out = WORK / f"{os.getpid()}-{os.urandom(4).hex()}"
        out.mkdir(parents=True)
        os.sync()  # what others left to be written must not count against the next one
        return out

    def _call(self, command: list[str], out: Path, threads: int) -> None:
        """Run a command and wait until all it started is gone."""
        environment = os.environ | {KEY_VARIABLE: out.name, "OMP_NUM_THREADS": str(threads)}
        log_path = out / "log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
            try:
                code = process.wait(LIMIT_SECONDS)
            except BaseException:
                for pid in [*find_processes(KEY_VARIABLE, out.name), process.pid]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, 9)
                process.wait()
                raise
        if code:
            tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-40:])
            raise SystemExit(f"{' '.join(command)} failed with {code}:\n{tail}")
        # The drain stays a moment longer than the ranks.
        wait_until(
            lambda: not find_processes(KEY_VARIABLE, out.name),
            END_LIMIT_SECONDS,
            "the end of the processes",
            POLL_SECONDS,
        )


def read_run(out: Path, ranks: int) -> tuple[Run, int]:
    """Put together what the ranks wrote: rank 0's, with the longest stall and load of any rank."""
    contents: list[dict[str, Any]] = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    state_bytes = contents[0].pop("state_bytes")
    saves = [SaveRecord(**save) for save in contents[0].pop("saves")]
    for other in contents[1:]:
        for save, theirs in zip(saves, other["saves"], strict=True):
            save.stall_seconds = max(save.stall_seconds, theirs["stall_seconds"])
            save.durable_at = max(save.durable_at, theirs["durable_at"])
        for name, seconds in other["loads"].items():
            contents[0]["loads"][name] = max(contents[0]["loads"][name], seconds)
    return Run(saves=saves, **contents[0]), state_bytes


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=124_000_000, help="size of the model (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=16, help="of each rank's batch (default %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of all ranks (default: all cores)")
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender (default %(default)s)")
    parser.add_argument("--saves", type=int, default=3, help="of each run, after one that warms up (default 3)")
    parser.add_argument("--every", type=int, default=12, help="steps from save to save (default %(default)s)")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS, help="whom to compare with")
    parser.add_argument("--growth-saves", type=int, default=200, help="saves of the 20 MB state (default %(default)s)")
    parser.add_argument("--rss", action="store_true", help="measure the growth of the processes and nothing else")
    parser.add_argument("--quick", action="store_true", help="a small model, one round, torch.save and Surefoot only")
    options = parser.parse_args(arguments)
    if options.quick:
        options.params, options.rounds, options.saves, options.every, options.growth_saves = 1_000_000, 1, 2, 20, 20
        options.ranks, options.peers, options.threads = "1", ["torch.save"], 1
    options.contenders = [BARE, *options.peers, *(list(SUREFOOT)[:1] if options.quick else SUREFOOT)]
    options.ranks = [int(number) for number in options.ranks.split(",")]
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    with Bench(options) as bench:
        if options.rss:
            bench.measure_growth()
            publish("checkpoint-rss", *growth_row(bench.results))
            return
        bench.measure_growth()
        for number in range(options.rounds):
            bench.measure_floors()
            # Who comes first changes, so that slow drifts of the machine are shared out.
            first = number % len(options.contenders)
            order = options.contenders[first:] + options.contenders[:first]
            for ranks in options.ranks:
                for contender in order:
                    print(f"round {number + 1} of {options.rounds}: {contender}, {ranks} ranks", flush=True)
                    bench.run(contender, ranks)
            publish_all(bench.results)  # after every round: whoever stops it early has what was measured


if __name__ == "__main__":
    main()
