"""`surefoot verify`, `surefoot checkpoints list` and `show`. They only read, also while the job runs.

`surefoot checkpoints JOB` asks the api instead of looking into a folder. What changes storage is in
`checkpoint_changes` and `checkpoint_moves`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from surefoot.checkpoint.catalog import list_committed, read_manifest, read_scalars, verify
from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.checkpoint.manifest import MANIFEST_FILE
from surefoot.checkpoint.marks import PINNED_FILE, STABLE_FILE, read_pin, read_stable
from surefoot.checkpoint.store import LocalStore
from surefoot.cli import checkpoint_changes, checkpoint_moves, client_jobs
from surefoot.cli.folders import checkpoint_folder, current_checkpoints, job_folders, locate, pick_checkpoint
from surefoot.cli.options import AttemptOption, PathOrJob, StepOption
from surefoot.cli.output import JsonOption, mebibytes, print_json, print_table
from surefoot.cli.stack import DEFAULT_HOME, HomeOption
from surefoot.errors import EXIT_DAMAGED, EXIT_FAILED, CheckpointError, DamagedCheckpoint, UsageError

EXIT_CODES = (
    "Exit status: 0 done; 1 failed, or there is no such checkpoint; 2 bad input, nothing was changed; 3 damage found."
)


class _JobOrCommand(TyperGroup):
    """Takes a word that is no command for the name of a job."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the words mean."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["of", *args]
        return super().resolve_command(ctx, args)


group = typer.Typer(
    cls=_JobOrCommand,
    no_args_is_help=True,
    help="The checkpoints of a job: `surefoot checkpoints JOB` asks the services; the commands look at a folder, given "
    "as a path or as the name of a job in <home>/checkpoints.",
)


def register(app: typer.Typer) -> None:
    """Add these commands to the application."""
    app.command("verify", epilog=EXIT_CODES)(verify_command)
    group.command("of")(client_jobs.checkpoints)
    group.command("list", epilog=EXIT_CODES)(list_command)
    group.command("show", epilog=EXIT_CODES)(show_command)
    checkpoint_changes.register(group, EXIT_CODES)
    checkpoint_moves.register(group, EXIT_CODES)
    app.add_typer(group, name="checkpoints")


@dataclass(frozen=True)
class Verdict:
    """What reading every byte of a checkpoint said.

    Attributes:
        path: Its folder.
        job: Name of the job's folder.
        attempt: Of the checkpoint.
        step: Of the checkpoint.
        problem: None for a good one.
        unreadable: It could not be read, which says nothing about whether it is damaged.
    """

    path: str
    job: str
    attempt: int
    step: int
    problem: str | None
    unreadable: bool = False

    @property
    def is_damaged(self) -> bool:
        """Whether it was read and is not as it was written."""
        return self.problem is not None and not self.unreadable


def verify_job(job_folder: Path, ids: list[CheckpointId]) -> list[Verdict]:
    """Check size and checksum of every file of the checkpoints. Reads all of them, whatever is wrong with one.

    One that was removed or quarantined meanwhile is left out: it only looks damaged.
    """
    store = LocalStore(job_folder)
    return [verdict for checkpoint_id in ids if (verdict := _verdict(store, checkpoint_id)) is not None]


def _verdict(store: LocalStore, checkpoint_id: CheckpointId) -> Verdict | None:
    name = folder_name(checkpoint_id)
    problem, unreadable = None, False
    try:
        verify(store, checkpoint_id)
    except (CheckpointError, OSError) as error:
        with suppress(OSError):  # a folder that cannot be listed is still there
            if MANIFEST_FILE not in store.list(name):
                return None
        unreadable = not isinstance(error, DamagedCheckpoint)
        problem = f"cannot be read: {_error_text(error)}" if unreadable else str(error)
    path = str(store.root / name)
    return Verdict(path, store.root.name, checkpoint_id.attempt, checkpoint_id.step, problem, unreadable)


def _error_text(error: Exception) -> str:
    """Return what went wrong for a person to read: of a system error its file and its words, without a number."""
    if isinstance(error, OSError) and error.strerror is not None:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error)


def verify_command(what: PathOrJob, as_json: JsonOption = False, home: HomeOption = DEFAULT_HOME) -> None:
    """Read every byte of the checkpoints under PATH|JOB and compare sizes and checksums with their manifests.

    Exit status 1 when nothing is damaged and something could not be read.
    """
    path = locate(what, home)
    single = checkpoint_folder(path)
    if single is not None:
        verdicts = verify_job(single[0], [single[1]])
    else:
        jobs = job_folders(path)
        verdicts = [v for job in jobs for v in verify_job(job, list_committed(LocalStore(job)))]
    if not verdicts:
        raise UsageError("PATH|JOB", f"{path} holds no committed checkpoint")
    num_good = sum(verdict.problem is None for verdict in verdicts)
    num_damaged = sum(verdict.is_damaged for verdict in verdicts)
    num_unreadable = len(verdicts) - num_good - num_damaged
    if as_json:
        print_json([asdict(verdict) | {"ok": verdict.problem is None} for verdict in verdicts])
    else:
        rows = [[v.job, str(v.step), str(v.attempt), v.problem or "ok"] for v in verdicts]
        print_table(["job", "step", "attempt", "verdict"], rows)
        unreadable = f", {num_unreadable} could not be read" if num_unreadable else ""
        print(f"{num_good} good, {num_damaged} damaged{unreadable}")
    if num_damaged:
        raise typer.Exit(EXIT_DAMAGED)
    if num_unreadable:
        raise typer.Exit(EXIT_FAILED)


def list_command(what: PathOrJob, as_json: JsonOption = False, home: HomeOption = DEFAULT_HOME) -> None:
    """List committed checkpoints, newest first.

    current: a restart may use it; abandoned: training went on from an older one; damaged: its manifest is;
    unreadable: its manifest is of a newer Surefoot, no file, or the disk fails.
    """
    entries = [entry for job in job_folders(locate(what, home)) for entry in _entries(job)]
    if as_json:
        print_json(entries)
        return
    columns = ["job", "step", "attempt", "state", "stable", "pinned", "world size", "size", "path"]
    print_table(columns, [_row(entry) for entry in entries])


def _row(entry: dict[str, Any]) -> list[str]:
    names = [str(entry[name]) for name in ("job", "step", "attempt", "state")]
    marks = ["yes" if entry[name] else "-" for name in ("stable", "pinned")]
    return [*names, *marks, str(entry["world_size"] or "-"), mebibytes(entry["num_bytes"]), entry["path"]]


def show_command(
    what: PathOrJob,
    step: StepOption = None,
    attempt: AttemptOption = None,
    as_json: JsonOption = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Show one checkpoint: its files, its marks and its scalars. For a job, the newest that is current."""
    job, checkpoint_id = pick_checkpoint(locate(what, home), step, attempt)
    store = LocalStore(job)
    manifest, scalars = read_manifest(store, checkpoint_id), read_scalars(store, checkpoint_id)
    stable, pinned = read_stable(store, checkpoint_id), read_pin(store, checkpoint_id)
    if as_json:
        marks = {
            "stable": None if stable is None else stable.model_dump(mode="json"),
            "pinned": None if pinned is None else pinned.model_dump(mode="json"),
        }
        print_json({"manifest": manifest.model_dump(mode="json"), **marks, "scalars": scalars})
        return
    size = mebibytes(manifest.num_bytes)
    print(job / folder_name(checkpoint_id))
    print(f"step {manifest.step}, attempt {manifest.attempt}, {manifest.world_size} ranks, {size}")
    if stable is not None:
        print(f"STABLE since {stable.promoted_at:%Y-%m-%d %H:%M:%S} UTC")
    if pinned is not None:
        print(f"pinned by {pinned.pinned_by} at {pinned.pinned_at:%Y-%m-%d %H:%M:%S} UTC: {pinned.reason}")
    print_table(["file", "bytes", "xxh3-128"], [[f.file, f"{f.num_bytes:,}", f.xxh3_128] for f in manifest.files])
    print_json(scalars)


def _entries(job: Path) -> list[dict[str, Any]]:
    store = LocalStore(job)
    ids, current = list_committed(store), current_checkpoints(store)
    return [_entry(store, checkpoint_id, checkpoint_id in current) for checkpoint_id in sorted(ids, reverse=True)]


def _entry(store: LocalStore, checkpoint_id: CheckpointId, is_current: bool) -> dict[str, Any]:
    names = store.list(folder_name(checkpoint_id))
    state, world_size, num_bytes = "current" if is_current else "abandoned", None, 0
    try:
        manifest = read_manifest(store, checkpoint_id)
        world_size, num_bytes = manifest.world_size, manifest.num_bytes
    except DamagedCheckpoint:
        state = "damaged"
    except (CheckpointError, OSError):
        state = "unreadable"
    return {
        "job": store.root.name, "step": checkpoint_id.step, "attempt": checkpoint_id.attempt, "state": state,
        "stable": STABLE_FILE in names, "pinned": PINNED_FILE in names, "world_size": world_size,
        "num_bytes": num_bytes, "path": str(store.root / folder_name(checkpoint_id)),
    }  # fmt: skip
