"""`surefoot checkpoints pin | unpin | prune | rescan`: what is kept, and what lies around."""

from __future__ import annotations

import getpass
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from surefoot.checkpoint import marks, prune
from surefoot.checkpoint.catalog import list_committed, read_manifest
from surefoot.checkpoint.damage import QUARANTINE_FOLDER
from surefoot.checkpoint.ids import CheckpointId, folder_name, parse_folder_name
from surefoot.checkpoint.manifest import MANIFEST_FILE
from surefoot.checkpoint.store import TEMP_PREFIX, LocalStore
from surefoot.cli import client_jobs
from surefoot.cli.folders import locate, one_job_folder, pick_checkpoint
from surefoot.cli.options import AttemptOption, PathOrJob, StepOption
from surefoot.cli.output import JsonOption, print_json, print_table
from surefoot.cli.stack import DEFAULT_HOME, HomeOption
from surefoot.embedded.stack_file import running_stack
from surefoot.errors import EXIT_DAMAGED, EXIT_FAILED, CheckpointError, DamagedCheckpoint, SurefootError, UsageError
from surefoot.spec import JobSpec, RetentionSpec, load_spec, parse_spec

AGREE_SECONDS = 90.0
"""How long `rescan` waits for the writer, which looks every 30 s."""
_POLL_SECONDS = 0.5


def register(group: typer.Typer, epilog: str) -> None:
    """Add the commands.

    Args:
        group: To this.
        epilog: What the exit statuses mean.
    """
    for name, function in (("pin", pin), ("unpin", unpin), ("prune", prune_command), ("rescan", rescan)):
        group.command(name, epilog=epilog)(function)


def pin(
    what: PathOrJob,
    reason: Annotated[str, typer.Option("--reason", "-r", help="What for, for whoever finds it later.")],
    step: StepOption = None,
    attempt: AttemptOption = None,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Keep a checkpoint until it is unpinned, whatever the retention says. Of a job, the newest that is current."""
    job, checkpoint_id = pick_checkpoint(locate(what, home), step, attempt)
    marks.pin(LocalStore(job), checkpoint_id, reason, by=_user())
    print(f"{job / folder_name(checkpoint_id)} is pinned")


def unpin(
    what: PathOrJob, step: StepOption = None, attempt: AttemptOption = None, home: HomeOption = DEFAULT_HOME
) -> None:
    """Leave a checkpoint to the retention again."""
    job, checkpoint_id = pick_checkpoint(locate(what, home), step, attempt)
    was_pinned = marks.unpin(LocalStore(job), checkpoint_id)
    print(f"{job / folder_name(checkpoint_id)} {'is no longer pinned' if was_pinned else 'was not pinned'}")


def prune_command(
    what: PathOrJob,
    *,
    spec: Annotated[
        Path | None, typer.Option("--spec", metavar="FILE", help="Take checkpoint.retention of this spec.")
    ] = None,
    keep_last: Annotated[int | None, typer.Option("--keep-last", min=1, help="Keep the newest so many.")] = None,
    keep_every_steps: Annotated[
        int | None, typer.Option("--keep-every-steps", min=1, help="Keep those at multiples of so many steps.")
    ] = None,
    keep_best: Annotated[int | None, typer.Option("--keep-best", min=0, help="Keep the best so many by loss.")] = None,
    keep_stable: Annotated[
        int | None, typer.Option("--keep-stable", min=2, help="Keep the newest so many STABLE ones.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: JsonOption = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Remove what no rule keeps: as --spec says, else keep_last 5 and keep_stable 2; options win.

    What a restart may need, what is pinned and what may yet become STABLE is never removed. A job that a stack runs is
    left to its writer, which knows what commands still need.
    """
    job = one_job_folder(locate(what, home))
    wanted = {
        "keep_last": keep_last, "keep_every_steps": keep_every_steps, "keep_best": keep_best,
        "keep_stable": keep_stable,
    }  # fmt: skip
    rules = RetentionSpec() if spec is None else load_spec(spec).checkpoint.retention
    policy = rules.model_copy(update={name: value for name, value in wanted.items() if value is not None})
    store = LocalStore(job)
    if dry_run:
        doomed = prune.plan(store, policy)
    else:
        if _spec_in_stack(home, job) is not None:
            problem = f"{job} is a job of the stack in {home}, whose writer prunes it; use --dry-run"
            raise UsageError("PATH|JOB", problem)
        doomed = prune.prune(store, policy, job=job.name)
    if as_json:
        print_json([{"attempt": i.attempt, "step": i.step, "reason": reason} for i, reason in doomed])
        return
    print_table(["step", "attempt", "reason"], [[str(i.step), str(i.attempt), reason] for i, reason in doomed])
    print(f"{len(doomed)} {'would be' if dry_run else 'were'} removed, {_num_left(store, doomed, dry_run)} stay")


def _num_left(store: LocalStore, doomed: list[tuple[CheckpointId, str]], dry_run: bool) -> int:
    return len(list_committed(store)) - (len(doomed) if dry_run else 0)


def rescan(what: PathOrJob, as_json: JsonOption = False, home: HomeOption = DEFAULT_HOME) -> None:
    """Say what lies in a job's folder, and have a running stack's catalogue agree with it.

    Files are the truth: the writer compares its table with them every 30 s; this waits until both agree. Exit status 3:
    a manifest or a name is damaged; 1: a manifest cannot be read, or the stack did not come to agree.
    """
    job = one_job_folder(locate(what, home))
    findings = survey(LocalStore(job))
    agreed = None if _spec_in_stack(home, job) is None else _wait_for_catalogue(home, job)
    if as_json:
        print_json({**findings, "catalogue_agrees": agreed})
    else:
        print_table(["what", "number", "names"], [[n, str(len(f)), " ".join(f) or "-"] for n, f in findings.items()])
        says = {None: "no stack runs this job", True: "the catalogue agrees", False: "the catalogue does not agree yet"}
        print(says[agreed])
    if findings["damaged"] or findings["not understood"]:
        raise typer.Exit(EXIT_DAMAGED)
    if findings["unreadable"] or agreed is False:
        raise typer.Exit(EXIT_FAILED)


def survey(store: LocalStore) -> dict[str, list[str]]:
    """Return the names in a job's folder by what they are. Reads manifests, no shards."""
    folders = {name: parse_folder_name(name) for name in store.list("") if name.startswith("step-")}
    committed = {name: i for name, i in folders.items() if i is not None and MANIFEST_FILE in store.list(name)}
    states = {name: _manifest_state(store, id_) for name, id_ in committed.items()}
    return {
        "committed": list(committed),
        "damaged": [name for name, state in states.items() if state == "damaged"],
        "unreadable": [name for name, state in states.items() if state == "unreadable"],
        "not committed": [name for name, id_ in folders.items() if id_ is not None and name not in committed],
        "not understood": [name for name, id_ in folders.items() if id_ is None],
        "quarantine": store.list(QUARANTINE_FOLDER),
        "trash": [name for name in store.list(marks.TRASH_FOLDER) if parse_folder_name(name) is not None],
        "temporary": sorted(path.name for path in store.root.glob(f"{TEMP_PREFIX}*")),
    }


def _manifest_state(store: LocalStore, checkpoint_id: CheckpointId) -> Literal["good", "damaged", "unreadable"]:
    try:
        read_manifest(store, checkpoint_id)
    except DamagedCheckpoint:
        return "damaged"
    except (CheckpointError, OSError):
        return "unreadable"
    return "good"


def _spec_in_stack(home: Path, job: Path) -> JobSpec | None:
    """Return the spec that a running stack has for this job folder, None when it runs no such job."""
    if running_stack(home) is None and "SUREFOOT_API_URL" not in os.environ:
        return None
    with client_jobs.api(home) as client:
        row = _job_row(client, job.name)
    if row is None:
        return None
    spec = parse_spec(row["spec"])
    return spec if (spec.storage / spec.job).absolute().resolve() == job.absolute().resolve() else None


def _job_row(client: Any, job: str) -> dict[str, Any] | None:
    from surefoot.cli.client import ApiRefused  # with httpx, which only this needs

    try:
        row: dict[str, Any] = client.get("jobs", job)
    except ApiRefused as error:
        if error.status == 404:
            return None
        raise
    return row


def _wait_for_catalogue(home: Path, job: Path) -> bool:
    """Wait until the rows of a job are what lies in its folder; False when it takes too long."""
    deadline = time.monotonic() + AGREE_SECONDS
    with client_jobs.api(home) as client:
        while True:
            with suppress(SurefootError):  # the api is started again, say: it is asked once more
                rows = client.list("checkpoints", "jobs", job.name, "checkpoints")
                known = {CheckpointId(r["attempt"], r["step"]) for r in rows if r["state"] == "COMMITTED"}
                if known == set(list_committed(LocalStore(job))):
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)


def _user() -> str:
    with suppress(OSError, KeyError):  # a container's user may have no name
        return os.environ.get("USER") or getpass.getuser()
    return f"user {os.getuid()}"
