"""`surefoot watch` and `surefoot logs`: the live view and the ranks' output, over the api."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from surefoot.cli.client_jobs import EXIT_STATUS, JobArgument, api
from surefoot.cli.stack import DEFAULT_HOME, HomeOption
from surefoot.cli.view import ViewMode, showing
from surefoot.errors import EXIT_OK
from surefoot.events import JobState, LogLine
from surefoot.spec import parse_spec

if TYPE_CHECKING:
    from surefoot.cli.client import ApiClient

POLL_SECONDS = 0.5
LOOK_BACK = timedelta(minutes=10)
"""A job that has run for long is shown from here on, and not step by step from its beginning."""


def register(app: typer.Typer, epilog: str) -> None:
    """Add the commands.

    Args:
        app: To this.
        epilog: What the exit statuses mean.
    """
    app.command("watch", epilog=epilog)(watch)
    app.command("logs", epilog=epilog)(logs)


def watch(
    job: JobArgument,
    plain: Annotated[bool, typer.Option("--plain", help="Occasional lines instead of the live panel.")] = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Show a job while it runs, incidents included, until it ends.

    Ctrl-C ends only the view. Exit status: 0 the job succeeded; 1 it failed; 75 it was stopped.
    """
    with api(home) as client:
        raise typer.Exit(watch_job(client, job, plain=plain))


def watch_job(client: ApiClient, job: str, *, plain: bool) -> int:
    """Show a job until it ends.

    Returns:
        The exit code that says how it ended; 0 when the person has seen enough.

    Raises:
        ApiRefused: there is no such job.
        ApiUnreachable: nobody has answered for long.
    """
    from surefoot.cli.client_stream import ApiSource

    row = client.get("jobs", job)
    if (state := JobState(row["state"])).is_final:
        _print_end(row)
        return EXIT_STATUS[state]
    source = ApiSource(client, job, _after(row))
    try:
        with showing(parse_spec(row["spec"]), Console(), ViewMode.PLAIN if plain else ViewMode.LIVE, source):
            row = _until_ended(client, job)
            source.settle()
    except KeyboardInterrupt:
        print(f"the job goes on; see it again with `surefoot watch {job}`, end it with `surefoot stop {job}`")
        return EXIT_OK
    finally:
        source.close()
    _print_end(row)
    return EXIT_STATUS[JobState(row["state"])]


def logs(
    job: JobArgument,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines come.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", "-r", min=0, help="Only what this rank writes.")] = None,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Print what a job's ranks wrote lately: the services keep an hour of it, the log files keep all."""
    with api(home) as client:
        from surefoot.cli.client_stream import JobStream

        stream = JobStream(client, job, "logs", follow=follow)
        try:
            for line in stream:
                if isinstance(line, LogLine) and (rank is None or line.rank == rank):
                    print(f"[rank {line.rank}] {line.text}", flush=follow)
        except KeyboardInterrupt:
            pass
        finally:
            stream.close()


def _after(row: dict[str, Any]) -> str:
    """Return the stream id from which on a job's events are shown: its start, unless that is long ago."""
    began = datetime.fromisoformat(row["started_at"] or row["updated_at"]) - timedelta(seconds=5)
    return f"{int(1000 * max(began, datetime.now(UTC) - LOOK_BACK).timestamp())}-0"


def _until_ended(client: ApiClient, job: str) -> dict[str, Any]:
    from surefoot.cli.client import ApiUnreachable
    from surefoot.cli.client_stream import LONGEST_OUTAGE_SECONDS

    answered_seconds = time.monotonic()
    while True:
        try:
            row = client.get("jobs", job)
            answered_seconds = time.monotonic()
            if JobState(row["state"]).is_final:
                return row
        except ApiUnreachable:
            if time.monotonic() - answered_seconds > LONGEST_OUTAGE_SECONDS:
                raise
        time.sleep(POLL_SECONDS)


def _print_end(row: dict[str, Any]) -> None:
    step = "" if row["step"] is None else f" at step {row['step']}"
    print(f"job {row['name']}: {row['state']}{step}: {row['reason'].strip() or 'no reason was given'}")
