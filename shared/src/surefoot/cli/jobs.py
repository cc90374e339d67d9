"""`surefoot attempts` and `surefoot spec`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml

from surefoot import preflight
from surefoot.checkpoint.attempts import AttemptLog, AttemptRecord
from surefoot.checkpoint.store import LocalStore
from surefoot.cli.folders import locate, one_job_folder
from surefoot.cli.output import JsonOption, print_json, print_table
from surefoot.cli.stack import DEFAULT_HOME, HomeOption
from surefoot.spec import load_spec, spec_keys

spec_group = typer.Typer(no_args_is_help=True, help="Work with spec files.")


def register(app: typer.Typer) -> None:
    """Add these commands to the application."""
    app.command("attempts")(attempts_command)
    app.add_typer(spec_group, name="spec")


def attempts_command(
    what: Annotated[str, typer.Argument(metavar="PATH|JOB", help="A job folder (<storage>/<job>), or a job's name.")],
    as_json: JsonOption = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Show every attempt of a job: what it started from and why there is one."""
    records = list(AttemptLog(LocalStore(one_job_folder(locate(what, home)))).read_all().values())
    if as_json:
        print_json([record.model_dump(mode="json") for record in records])
        return
    columns = [
        "attempt",
        "from",
        "source",
        "cause",
        "world size",
        "lr factor",
        "skip windows",
        "host",
        "started (UTC)",
    ]
    print_table(columns, [_row(record) for record in records])


def _row(record: AttemptRecord) -> list[str]:
    start = record.starts_from
    windows = " ".join(f"[{window.start}, {window.stop})" for window in record.skip_windows)
    return [
        str(record.attempt),
        f"step {start.step} of attempt {start.attempt}" if start.attempt else "step 0",
        start.source,
        record.cause,
        str(record.world_size),
        f"{record.lr_factor:g}",
        windows or "-",
        record.host,
        f"{record.started_at:%Y-%m-%d %H:%M:%S}",
    ]


@spec_group.command("check", epilog="Exit status: 0 this machine can start it; 2 it cannot, and the key is named.")
def check_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML or JSON spec.")],
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print the spec with all defaults.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say whether `surefoot run FILE` could start here, without starting or writing anything."""
    spec = preflight.check(load_spec(file))
    if as_json:
        print_json(spec.model_dump(mode="json"))
        return
    if verbose:
        print(yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False), end="")
    print(f"{file}: ok: job {spec.job!r}, {spec.nproc_per_node} ranks, {spec.entrypoint}")


@spec_group.command("keys")
def keys_command(as_json: JsonOption = False) -> None:
    """List every key that a spec may hold, with type, default and meaning."""
    keys = list(spec_keys())
    if as_json:
        print_json([key._asdict() for key in keys])
        return
    print_table(["key", "type", "default", "meaning"], [list(key) for key in keys])
