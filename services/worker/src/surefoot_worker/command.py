"""`surefoot run`: check the spec, launch the ranks from the main thread, show them from another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from surefoot import preflight
from surefoot.cli.tail import EventTail
from surefoot.cli.view import ViewMode, showing
from surefoot.cli.view_state import describe_exit
from surefoot.errors import EXIT_OK, EXIT_PREEMPTED
from surefoot.events import JobFinished, RankFailed
from surefoot.spec import load_spec
from surefoot_worker.launcher.signals import SignalInbox


def run(
    file: Annotated[Path, typer.Argument(metavar="SPEC", help="What to run: a YAML or JSON spec.")],
    *,
    from_seed: Annotated[
        bool, typer.Option("--from-seed", help="Start over at step 0, although the job may have progress.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Occasional lines instead of the live panel.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show only how it ended, if badly.")] = False,
) -> None:
    """Run a training job and keep it running.

    Ctrl-C or SIGTERM: save, stop and exit 75; run it again to go on.
    """
    with SignalInbox() as inbox:  # first of all: from here on a signal is an orderly end
        spec = preflight.check(load_spec(file))
        mode = ViewMode.QUIET if quiet else ViewMode.PLAIN if plain else ViewMode.LIVE
        outcome = EventTail(spec.events_path)
        console = Console()
        if mode is not ViewMode.QUIET:
            # Absolute: relative paths of a spec depend on the folder the command is run in.
            folders = f"checkpoints in {spec.storage.absolute() / spec.job}, logs in {spec.job_run_dir.absolute()}"
            console.print(f"job {spec.job}: {folders}", highlight=False, markup=False, soft_wrap=True)
        with showing(spec, console, mode):
            from surefoot_worker.launcher.main import launch  # torch: seconds that bad input must not wait for

            code = launch(spec, from_seed=from_seed, inbox=inbox)
    if code not in (EXIT_OK, EXIT_PREEMPTED):
        _explain(outcome, spec.job_run_dir / "logs", with_traceback=mode is ViewMode.QUIET)
    raise typer.Exit(code)


def _explain(outcome: EventTail, logs: Path, *, with_traceback: bool) -> None:
    """Say on stderr how the job ended: its reason, after the traceback where the view has not shown that."""
    events = outcome.poll()
    failures = [event for event in events if isinstance(event, RankFailed)] if with_traceback else []
    for failure in failures[-1:]:
        _say(failure.traceback or f"rank {failure.rank} {describe_exit(failure)}")
    for finished in (event for event in events if isinstance(event, JobFinished)):
        reason = finished.reason.partition("\n")[0]  # the traceback stands above, or in the logs
        _say(f"surefoot: {finished.state}: {reason}; logs are in {logs}")


def _say(text: str) -> None:
    sys.stderr.write(f"{text.rstrip()}\n")
