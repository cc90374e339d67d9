"""`surefoot submit | jobs | stop | save | rollback | set-lr | incidents` and `checkpoints JOB`: jobs over the api."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli.output import JsonOption, mebibytes, print_json, print_table
from surefoot.cli.stack import DEFAULT_HOME, HomeOption
from surefoot.errors import EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED, SurefootError, UsageError
from surefoot.events import JobState
from surefoot.spec import load_spec
from surefoot.spec_paths import with_absolute_paths

if TYPE_CHECKING:
    from surefoot.cli.client import ApiClient

POLL_SECONDS = 0.2
EXIT_STATUS = {JobState.SUCCEEDED: EXIT_OK, JobState.STOPPED: EXIT_PREEMPTED, JobState.FAILED: EXIT_FAILED}

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Name of a job.")]
WaitOption = Annotated[bool, typer.Option("--wait", help="Return when it is done; exit status 1 when it fails.")]
LimitOption = Annotated[int | None, typer.Option("--limit", "-n", min=1, help="Show only so many.")]


def register(app: typer.Typer, epilog: str) -> None:
    """Add the commands.

    Args:
        app: To this.
        epilog: What the exit statuses mean.
    """
    commands: dict[str, Callable[..., None]] = {
        "submit": submit, "jobs": jobs, "stop": stop, "save": save, "rollback": rollback, "set-lr": set_lr,
        "incidents": incidents,
    }  # fmt: skip
    for name, function in commands.items():
        app.command(name, epilog=epilog)(function)


def api(home: Path) -> ApiClient:
    """Return a client of the api; see `surefoot.cli.client.connect`."""
    if importlib.util.find_spec("httpx") is None:
        raise UsageError("surefoot", "this command needs httpx: pip install 'surefoot[services]'")
    from surefoot.cli.client import connect  # httpx: seconds and a package that other commands do not need

    return connect(home)


def submit(
    file: Annotated[Path, typer.Argument(metavar="SPEC", help="What to run: a YAML or JSON spec.")],
    *,
    from_seed: Annotated[
        bool, typer.Option("--from-seed", help="Start over at step 0, although the job may have progress.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Then show it, as `surefoot watch` does.")] = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Hand a job to the services. One that has ended goes on from what it saved."""
    spec = with_absolute_paths(load_spec(file), Path.cwd())
    body = {"spec": spec.model_dump(mode="json", exclude_unset=True), "from_seed": from_seed}
    with api(home) as client:
        job = client.post("jobs", body=body)
        again = f", generation {job['generation']}" if job["generation"] > 1 else ""
        print(f"job {job['name']} was submitted{again}", flush=True)
        if watch:
            from surefoot.cli.client_watch import watch_job

            raise typer.Exit(watch_job(client, spec.job, plain=False))
    print(f"follow it with `surefoot watch {spec.job}`")


def jobs(limit: LimitOption = None, home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """List jobs, newest first."""
    with api(home) as client:
        rows = client.list("jobs", "jobs", limit=limit)
    if as_json:
        print_json(rows)
        return
    if not rows:
        print("no job was submitted yet")
        return
    columns = ["JOB", "STATE", "STEP", "ATTEMPT", "RANKS", "SUBMITTED (UTC)", "REASON"]
    print_table(columns, [_job_row(row) for row in rows])


def _job_row(row: dict[str, Any]) -> list[str]:
    step = "-" if row["step"] is None else f"{row['step']} / {row['total_steps'] or '?'}"
    reason = row["reason"].strip().partition("\n")[0]
    return [row["name"], row["state"], step, _text(row["attempt"]), _text(row["world_size"]),
            _moment(row["created_at"]), reason]  # fmt: skip


def stop(job: JobArgument, wait: WaitOption = False, home: HomeOption = DEFAULT_HOME) -> None:
    """Save a job's state and stop it; submit it again to go on."""
    with api(home) as client:
        operation = client.post("jobs", job, "stop")
        if not wait:
            print(f"job {job} is being saved and stopped")
            return
        _wait_for(client, operation)
        row = client.get("jobs", job)
    print(f"job {job}: {row['state']}: {row['reason']}")
    if row["state"] == JobState.FAILED:
        raise typer.Exit(EXIT_FAILED)


def save(job: JobArgument, wait: WaitOption = False, home: HomeOption = DEFAULT_HOME) -> None:
    """Make a job's next snapshot durable."""
    _ask(home, job, "checkpoint", {}, wait=wait)


def rollback(
    job: JobArgument,
    *,
    to_step: Annotated[
        int | None, typer.Option("--to-step", min=1, help="Step of a checkpoint; without it the newest STABLE one.")
    ] = None,
    to_attempt: Annotated[
        int | None, typer.Option("--to-attempt", min=1, help="Its attempt, where several have that step.")
    ] = None,
    lr_factor: Annotated[
        float | None, typer.Option("--lr-factor", help="Then train with this times the schedule's learning rate.")
    ] = None,
    wait: WaitOption = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Go back to a checkpoint, in process and as a new attempt."""
    arguments = {"to_step": to_step, "to_attempt": to_attempt, "lr_factor": lr_factor}
    _ask(home, job, "rollback", {name: value for name, value in arguments.items() if value is not None}, wait=wait)


def set_lr(
    job: JobArgument,
    factor: Annotated[float, typer.Argument(metavar="FACTOR", help="Multiplies the schedule's learning rate.")],
    *,
    hold_steps: Annotated[
        int | None, typer.Option("--hold-steps", min=0, help="Steps with that factor; without it for ever.")
    ] = None,
    rewarm_steps: Annotated[
        int, typer.Option("--rewarm-steps", min=0, help="Steps over which it then returns to 1.")
    ] = 0,
    wait: WaitOption = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Change a job's learning rate at once, as a new attempt."""
    body = {"lr_factor": factor, "lr_hold_steps": hold_steps, "lr_rewarm_steps": rewarm_steps}
    _ask(home, job, "set-lr", body, wait=wait)


def _ask(home: Path, job: str, verb: str, body: dict[str, Any], *, wait: bool) -> None:
    with api(home) as client:
        operation = client.post("jobs", job, verb, body=body)
        if not wait:
            print(f"{verb} of job {job} was asked for: operation {operation['id']}")
            return
        done = _wait_for(client, operation)
    attempt = "" if done["new_attempt"] is None else f" as attempt {done['new_attempt']}"
    print(f"{verb} of job {job} is done{attempt}: {done['detail']}")


def _wait_for(client: ApiClient, operation: dict[str, Any]) -> dict[str, Any]:
    """Return the operation once it is done.

    Raises:
        SurefootError: it failed; says why.
    """
    from surefoot.cli.client import ApiUnreachable

    while operation["state"] in ("PENDING", "RUNNING"):
        time.sleep(POLL_SECONDS)
        with suppress(ApiUnreachable):  # it is started again; what was asked for is not lost
            operation = client.get("operations", operation["id"])
    if operation["state"] != "SUCCEEDED":
        raise SurefootError(f"{operation['kind']} of job {operation['job']} failed: {operation['detail']}")
    return operation


def incidents(
    job: JobArgument,
    number: Annotated[int | None, typer.Argument(metavar="[ID]", help="Show this one and what was done.")] = None,
    limit: LimitOption = None,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """List what went wrong with a job and what became of it, newest first."""
    with api(home) as client:
        if number is not None:
            _show_incident(client.get("incidents", number), job, as_json)
            return
        rows = client.list("incidents", "jobs", job, "incidents", limit=limit)
    if as_json:
        print_json(rows)
        return
    if not rows:
        print(f"job {job} had no incident")
        return
    columns = ["ID", "KIND", "SEVERITY", "STATE", "ATTEMPT", "STEP", "RECOVERY", "STEPS LOST", "OPENED (UTC)", "CAUSE"]
    print_table(columns, [_incident_row(row) for row in rows])


def _incident_row(row: dict[str, Any]) -> list[str]:
    seconds = "-" if row["recovery_seconds"] is None else f"{row['recovery_seconds']:.2f} s"
    return [str(row["id"]), row["kind"], row["severity"], row["state"], str(row["attempt"]), str(row["onset_step"]),
            seconds, _text(row["steps_lost"]), _moment(row["opened_at"]), row["cause"].partition("\n")[0]]  # fmt: skip


def _show_incident(incident: dict[str, Any], job: str, as_json: bool) -> None:
    if incident["job"] != job:
        raise UsageError("ID", f"incident {incident['id']} is of job {incident['job']}")
    if as_json:
        print_json(incident)
        return
    print_table(["ID", "KIND", "SEVERITY", "STATE"], [[str(incident["id"]), incident["kind"], incident["severity"],
                                                      incident["state"]]])  # fmt: skip
    for name in ("cause", "outcome", "evidence"):
        if incident[name]:
            print(f"{name}: {incident[name]}")
    columns = ["id", "kind", "rung", "state", "reason", "problem"]
    print_table(
        ["ACTION", *map(str.upper, columns[1:])],
        [[_text(action[name]) for name in columns] for action in incident["actions"]],
    )


def checkpoints(
    job: JobArgument, limit: LimitOption = None, home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False
) -> None:
    """List the checkpoints of a job that the services know, newest first."""
    with api(home) as client:
        rows = client.list("checkpoints", "jobs", job, "checkpoints", limit=limit)
    if as_json:
        print_json(rows)
        return
    if not rows:
        print(f"job {job} has no checkpoint yet")
        return
    columns = ["STEP", "ATTEMPT", "STATE", "STABLE", "PINNED", "LOSS", "VERIFIED", "RANKS", "SIZE", "COMMITTED (UTC)"]
    print_table([*columns, "PATH"], [_checkpoint_row(row) for row in rows])


def _checkpoint_row(row: dict[str, Any]) -> list[str]:
    state = row["state"].lower()
    if state == "committed":
        state = "abandoned" if row["on_lineage"] is False else "current"
    verified = row["verify_problem"] or ("-" if row["verified_at"] is None else "ok")
    stable, pinned = ("yes" if row[name] else "-" for name in ("stable", "pinned"))
    loss = "-" if row["loss"] is None else f"{row['loss']:.4g}"
    return [str(row["step"]), str(row["attempt"]), state, stable, pinned, loss, verified,
            str(row["world_size"]), mebibytes(row["num_bytes"]), _moment(row["committed_at"]), row["path"]]  # fmt: skip


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _moment(text: str) -> str:
    return text[:19].replace("T", " ")
