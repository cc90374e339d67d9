"""`surefoot checkpoints export | import`: checkpoints leave a job and come into one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from surefoot.checkpoint.export import DEFAULT_FILE_BYTES, export_checkpoint
from surefoot.checkpoint.ids import folder_name
from surefoot.checkpoint.importing import DEFAULT_STAGING_DIR, import_checkpoint
from surefoot.checkpoint.store import LocalStore
from surefoot.cli.folders import locate, pick_checkpoint
from surefoot.cli.options import AttemptOption, PathOrJob, StepOption
from surefoot.cli.output import JsonOption, mebibytes, print_json
from surefoot.cli.stack import DEFAULT_HOME, HomeOption
from surefoot.errors import UsageError
from surefoot.spec import JOB_NAME_PATTERN

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Z]*)")


def register(group: typer.Typer, epilog: str) -> None:
    """Add the commands.

    Args:
        group: To this.
        epilog: What the exit statuses mean.
    """
    group.command("export", epilog=epilog)(export)
    group.command("import", epilog=epilog)(import_command)


def export(
    what: PathOrJob,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The new folder.")],
    *,
    step: StepOption = None,
    attempt: AttemptOption = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", help="Most bytes of one weight file: 5GB, 500MB, 2GiB.")
    ] = f"{DEFAULT_FILE_BYTES // 10**9}GB",
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="A config.json, instead of the checkpoint's own.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="FILE", help="A tokenizer.json, or a folder with one.")
    ] = None,
    as_json: JsonOption = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Write a checkpoint's model as a Hugging Face folder for `AutoModelForCausalLM.from_pretrained`.

    Every byte is verified on the way. Of a job, the newest checkpoint that is current.
    """
    job, checkpoint_id = pick_checkpoint(locate(what, home), step, attempt)
    exported = export_checkpoint(
        LocalStore(job),
        checkpoint_id,
        target,
        max_file_bytes=parse_size(max_shard_size),
        config=None if config is None else _read_config(config),
        tokenizer=tokenizer,
    )
    if as_json:
        print_json(exported._asdict() | {"step": checkpoint_id.step, "attempt": checkpoint_id.attempt})
        return
    print(f"{folder_name(checkpoint_id)} of job {job.name} is in {target}: {exported.num_tensors} tensors, "
          f"{mebibytes(exported.num_bytes)}, {', '.join(exported.files)}")  # fmt: skip
    if exported.note:
        print(exported.note)


def import_command(
    what: PathOrJob,
    target: Annotated[str, typer.Argument(metavar="JOB_FOLDER|JOB", help="The new job: <storage>/<job>, or its name.")],
    *,
    step: StepOption = None,
    attempt: AttemptOption = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy the shards also where a hard link would do.")] = False,
    staging_dir: Annotated[
        Path, typer.Option("--staging-dir", help="checkpoint.staging_dir of the new job's spec; must hold none of it.")
    ] = DEFAULT_STAGING_DIR,
    as_json: JsonOption = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Make a checkpoint of any job the start of a new one; its next start goes on from there with everything.

    The weights of a Hugging Face folder come into a job by the key `init_from` of its spec instead.
    """
    if not target.strip():
        raise UsageError("JOB_FOLDER|JOB", "is empty; allowed: <storage>/<job>, or the name of a new job")
    path = locate(what, home)
    if (path / "config.json").is_file() and (any(path.glob("*.safetensors")) or any(path.glob("*.bin"))):
        raise UsageError(
            "PATH|JOB",
            f"{path} is a Hugging Face folder, which holds weights and no training state; "
            "name it in the spec of the new job: `init_from: <folder>`",
        )
    job, checkpoint_id = pick_checkpoint(path, step, attempt)
    named = re.fullmatch(JOB_NAME_PATTERN, target) is not None and not Path(target).exists()
    folder = home / "checkpoints" / target if named else Path(target)
    imported = import_checkpoint(
        LocalStore(job), checkpoint_id, LocalStore(folder.absolute()), copy=copy, staging_dir=staging_dir
    )
    if as_json:
        print_json(imported._asdict())
        return
    how = "linked" if imported.linked else "copied"
    size = mebibytes(imported.num_bytes)
    print(f"job {folder.name} begins at step {imported.step}: {imported.folder} ({size}, {how})")
    if imported.note:
        print(imported.note)


def parse_size(text: str) -> int:
    """Return the bytes that e.g. 5GB, 500MB or 2GiB stand for.

    Raises:
        UsageError: it is no size.
    """
    match = _SIZE.fullmatch(text.strip().upper())
    num_bytes = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if num_bytes < 1:
        raise UsageError("--max-shard-size", f"is {text!r}; allowed: a size such as 5GB, 500MB or 2GiB")
    return num_bytes


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError("--config", f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError("--config", f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise UsageError("--config", f"{path} is not a model's config.json: it names no model_type")
    return content
