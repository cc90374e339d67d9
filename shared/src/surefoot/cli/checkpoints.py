"""`surefoot verify`, `surefoot checkpoints list` and `show`. They only read, also while the job runs.

`surefoot checkpoints JOB` asks the api instead of looking into a folder.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from surefoot.checkpoint.attempts import AttemptLog
from surefoot.checkpoint.catalog import list_committed, read_manifest, read_scalars, verify
from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.checkpoint.lineage import candidates
from surefoot.checkpoint.store import LocalStore
from surefoot.cli import client_jobs
from surefoot.cli.folders import checkpoint_folder, job_folders, one_job_folder
from surefoot.cli.output import JsonOption, mebibytes, print_json, print_table
from surefoot.errors import EXIT_DAMAGED, DamagedCheckpoint, SurefootError, UsageError

PathArgument = Annotated[
    Path, typer.Argument(metavar="PATH", help="A checkpoint folder, a job folder or a storage root.")
]
JobArgument = Annotated[Path, typer.Argument(metavar="PATH", help="A job folder (<storage>/<job>) or a storage root.")]



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
    help="List and show the checkpoints of a job: `surefoot checkpoints JOB` asks the services, list and show read "
    "a folder.",
)
group.command("of")(client_jobs.checkpoints)


def register(app: typer.Typer) -> None:
    """Add these commands to the application."""
    app.command("verify", epilog="Exit status: 0 all good; 3 damage found; 2 not a checkpoint.")(verify_command)
    app.add_typer(group, name="checkpoints")


@dataclass(frozen=True)
class Verdict:
    """What reading every byte of a checkpoint said. `problem` is None for a good one."""

    path: str
    job: str
    attempt: int
    step: int
    problem: str | None


def verify_job(job_folder: Path, ids: list[CheckpointId]) -> list[Verdict]:
    """Check size and checksum of every file of the checkpoints. Reads all of them."""
    store, verdicts = LocalStore(job_folder), []
    for checkpoint_id in ids:
        problem = None
        try:
            verify(store, checkpoint_id)
        except DamagedCheckpoint as error:
            problem = str(error)
        path = str(job_folder / folder_name(checkpoint_id))
        verdicts.append(Verdict(path, job_folder.name, checkpoint_id.attempt, checkpoint_id.step, problem))
    return verdicts


def verify_command(path: PathArgument, as_json: JsonOption = False) -> None:
    """Read every byte of the checkpoints under PATH and compare sizes and checksums with their manifests."""
    single = checkpoint_folder(path)
    if single is not None:
        verdicts = verify_job(single[0], [single[1]])
    else:
        jobs = job_folders(path)
        verdicts = [v for job in jobs for v in verify_job(job, list_committed(LocalStore(job)))]
    if not verdicts:
        raise UsageError("PATH", f"{path} holds no committed checkpoint")
    damaged = [verdict for verdict in verdicts if verdict.problem is not None]
    if as_json:
        print_json([asdict(verdict) | {"ok": verdict.problem is None} for verdict in verdicts])
    else:
        rows = [[v.job, str(v.step), str(v.attempt), v.problem or "ok"] for v in verdicts]
        print_table(["job", "step", "attempt", "verdict"], rows)
        print(f"{len(verdicts) - len(damaged)} good, {len(damaged)} damaged")
    if damaged:
        raise typer.Exit(EXIT_DAMAGED)


@group.command("list")
def list_command(path: JobArgument, as_json: JsonOption = False) -> None:
    """List committed checkpoints, newest first.

    current: a restart may use it; abandoned: training went on from an older one; damaged: its manifest is.
    """
    entries = [entry for job in job_folders(path) for entry in _entries(job)]
    if as_json:
        print_json(entries)
        return
    columns = ["job", "step", "attempt", "state", "world size", "size", "path"]
    print_table(columns, [_row(entry) for entry in entries])


def _row(entry: dict[str, Any]) -> list[str]:
    names = [str(entry[name]) for name in ("job", "step", "attempt", "state", "world_size")]
    return [*names, mebibytes(entry["num_bytes"]), entry["path"]]


@group.command("show")
def show_command(path: PathArgument, as_json: JsonOption = False) -> None:
    """Show one checkpoint: its files and its scalars. For a job folder, the newest that is current."""
    job, checkpoint_id = checkpoint_folder(path) or _newest(one_job_folder(path))
    store = LocalStore(job)
    manifest, scalars = read_manifest(store, checkpoint_id), read_scalars(store, checkpoint_id)
    if as_json:
        print_json({"manifest": manifest.model_dump(mode="json"), "scalars": scalars})
        return
    size = mebibytes(manifest.num_bytes)
    print(job / folder_name(checkpoint_id))
    print(f"step {manifest.step}, attempt {manifest.attempt}, {manifest.world_size} ranks, {size}")
    print_table(["file", "bytes", "xxh3-128"], [[f.file, f"{f.num_bytes:,}", f.xxh3_128] for f in manifest.files])
    print_json(scalars)


def _entries(job: Path) -> list[dict[str, Any]]:
    store = LocalStore(job)
    ids, current = list_committed(store), _current(store)
    entries: list[dict[str, Any]] = []
    for checkpoint_id in sorted(ids, reverse=True):
        entry: dict[str, Any] = {
            "job": job.name,
            "step": checkpoint_id.step,
            "attempt": checkpoint_id.attempt,
        }
        entry |= {
            "state": "current" if checkpoint_id in current else "abandoned",
            "world_size": None,
            "num_bytes": 0,
        }
        try:
            manifest = read_manifest(store, checkpoint_id)
            entry |= {"world_size": manifest.world_size, "num_bytes": manifest.num_bytes}
        except DamagedCheckpoint:
            entry["state"] = "damaged"
        entries.append(entry | {"path": str(job / folder_name(checkpoint_id))})
    return entries


def _newest(job: Path) -> tuple[Path, CheckpointId]:
    current = _current(LocalStore(job))
    if not current:
        raise SurefootError(f"{job} has no current checkpoint")
    return job, current[0]


def _current(store: LocalStore) -> list[CheckpointId]:
    """Return the checkpoints on the lineage of the newest attempt, newest first."""
    records = AttemptLog(store).read_all()
    return candidates(list_committed(store), max(records, default=0), records)
