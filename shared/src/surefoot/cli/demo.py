"""`surefoot demo`: the stack, a small language model, two faults on the way, and a report of what they cost."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape

from surefoot import preflight
from surefoot.cli.client import ApiClient
from surefoot.cli.client_stream import ApiSource
from surefoot.cli.demo_job import DemoJob, KillError, kill_rank_on_the_way
from surefoot.cli.demo_remote import RemoteJob
from surefoot.cli.demo_report import DemoReport, build_report, print_report
from surefoot.cli.demo_stack import DemoStack
from surefoot.cli.view import ViewMode, showing
from surefoot.entrypoint import RECIPE_MODULE
from surefoot.errors import EXIT_FAILED, UsageError
from surefoot.spec import JobSpec, parse_spec

JOB_NAME = "demo"
HOME = "surefoot"
"""Folder of the stack, in that of the demo."""
NUM_RANKS = 2
KILLED_RANK = 1
KILL_AT_RATIO = 0.3
BLOW_UP_AT_RATIO = 0.6
POLICY_FILE = Path(__file__).with_name("demo_policy.yaml")
FAULT_ENVIRONMENT_KEY = "SUREFOOT_TRAINING_FAULT"
NUM_SAVES = 20
"""By steps, not by time: a slow machine must not fill its disk."""
DEFAULT_WORK_DIR = Path(".surefoot/demo")
DEFAULT_CACHE_DIR = Path(".surefoot/data")
RUN_PREFIX = "run-"
OPTIONS_BY_KEY = {"recipe.data": "--data", "seed": "--seed", "recipe.steps": "--steps"}
LOCK_FILE = "surefoot-demo.lock"
"""Marks a folder as one of ours, and is held locked while its demo runs."""


def demo(
    *,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Text to train on: a folder or a file. Default: Python's own source."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report here as well.")
    ] = None,
    work_dir: Annotated[
        Path, typer.Option("--work-dir", help="Each demo gets a folder in here; the one before is removed.")
    ] = DEFAULT_WORK_DIR,
    steps: Annotated[int, typer.Option("--steps", min=200, help="Optimizer steps.")] = 300,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Initial weights and data order.")] = 0,
    plain: Annotated[bool, typer.Option("--plain", help="Occasional lines instead of the live panel.")] = False,
) -> None:
    """Start the services, submit a small Llama on 2 ranks, break it twice, and report how it healed.

    First a rank is killed with SIGKILL; later one update is blown up: its gradients are multiplied by 1e4 after
    clipping. Exit status 0 only if both incidents were healed, the job finished, the loss fell by at least 2.5 nats,
    every checkpoint that was kept is good and nothing is left behind.
    """
    console = Console()
    _refuse_bad_input(demo_spec(data, work_dir, _cache_dir(work_dir), steps, seed), work_dir, json_file)
    with _termination_as_interrupt(), _run_folder(work_dir.absolute()) as folder:
        document = demo_spec(data, folder, _cache_dir(work_dir), steps, seed)
        (folder / "spec.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
        report = _run(folder, parse_spec(document), console, ViewMode.PLAIN if plain else ViewMode.LIVE)
    print_report(report, console)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(report.to_json(), encoding="utf-8")
    if not report.passed:
        raise typer.Exit(EXIT_FAILED)


def _refuse_bad_input(document: dict[str, Any], work_dir: Path, json_file: Path | None) -> None:
    """Check everything that a minute of training should not be wasted on, by the names that the user gave."""
    preflight.require_writable("--work-dir", work_dir)
    if json_file is not None:
        preflight.require_writable("--json", json_file.parent)
        if json_file.is_dir():
            raise UsageError("--json", f"{json_file} is a folder; allowed: the path of a file")
    try:
        preflight.check(parse_spec(document))
    except UsageError as error:
        option = OPTIONS_BY_KEY.get(error.key)
        raise (UsageError(option, error.problem) if option else error) from None


def demo_spec(data: Path | None, folder: Path, cache_dir: Path, steps: int, seed: int) -> dict[str, Any]:
    """Return the spec of the demo's job as it is written to its spec file. 4.2 million parameters."""
    recipe: dict[str, Any] = {
        "cache_dir": str(cache_dir.absolute()),
        "sequence_length": 128,
        "global_batch_size": 16,
        "steps": steps,
        "learning_rate": 2e-3,
        "warmup_steps": min(20, steps // 5),
    }
    if data is not None:
        recipe["data"] = str(data.absolute())
    return {
        "job": JOB_NAME,
        "entrypoint": f"-m {RECIPE_MODULE}",
        "nproc_per_node": NUM_RANKS,
        "storage": str(folder.absolute() / HOME / "checkpoints"),
        "run_dir": str(folder.absolute() / HOME / "run" / "jobs"),
        "seed": seed,
        "env": {FAULT_ENVIRONMENT_KEY: f"blow_up(factor=1e4).at(step={int(steps * BLOW_UP_AT_RATIO)})"},
        "checkpoint": {"save_every_seconds": None, "save_every_steps": steps // NUM_SAVES},
        "policy": yaml.safe_load(POLICY_FILE.read_text(encoding="utf-8")),
        "recipe": recipe,
    }


def _run(folder: Path, spec: JobSpec, console: Console, mode: ViewMode) -> DemoReport:
    kill, problem, incidents = None, None, []
    steps = spec.recipe_or_defaults.steps
    say = partial(_say, console)
    with DemoStack(folder / HOME) as stack:
        say("starting the services: surefoot up")
        running = stack.wait_until_ready()
        say(f"api {running.urls['api']}, live page {running.urls['gateway']}")
        with ApiClient(running.urls["api"], running.token) as api:
            remote = RemoteJob(api, spec.job)
            job = DemoJob(spec, remote.end_reason)
            api.post("jobs", body={"spec": spec.model_dump(mode="json", exclude_unset=True)})
            say(f"submitted job {spec.job}; look at it from elsewhere: surefoot watch {spec.job} --home {stack.home}")
            source = ApiSource(api, spec.job, "0")
            with showing(spec, console, mode, source), closing(source):
                try:
                    kill = kill_rank_on_the_way(job, KILLED_RANK, at_step=int(steps * KILL_AT_RATIO), say=say)
                    remote.follow(say)
                except KillError as error:  # nothing to wait for: leaving the block ends the job
                    problem = str(error)
            incidents, outcome = remote.incidents(), remote.outcome()
        say("stopping the services: surefoot down")
        stack.down()
    leftovers = [*stack.leftovers, *job.sweep()]
    return build_report(
        spec, stack, outcome=outcome, kill=kill, problem=problem, incidents=incidents, leftovers=leftovers
    )


def _say(console: Console, text: str) -> None:
    console.print(f"[bold magenta]demo:[/bold magenta] {escape(text)}", highlight=False, soft_wrap=True)


def _cache_dir(work_dir: Path) -> Path:
    return DEFAULT_CACHE_DIR if work_dir == DEFAULT_WORK_DIR else work_dir / "data"


@contextmanager
def _run_folder(work_dir: Path) -> Iterator[Path]:
    """Make a folder for this demo, locked while it runs, and remove those of demos that ended."""
    for old in sorted(work_dir.glob(f"{RUN_PREFIX}*")):
        _remove_if_ended(old)
    folder = work_dir / f"{RUN_PREFIX}{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
    folder.mkdir(parents=True)
    with (folder / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def _remove_if_ended(folder: Path) -> None:
    try:
        with (folder / LOCK_FILE).open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # not a demo's folder, or its demo is running


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Let SIGTERM unwind the demo as Ctrl-C does, so that its children end with it."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
