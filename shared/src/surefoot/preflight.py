"""Is this job startable? Asked before anything is started or written, without importing torch.

`CHECKS` is the table: one small function per key. Each names its key and what is allowed.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from surefoot.checkpoint.attempts import ATTEMPTS_FOLDER
from surefoot.checkpoint.estimate import check_storage_room
from surefoot.checkpoint.locks import holder_pid
from surefoot.checkpoint.staging import free_bytes, required_bytes
from surefoot.checkpoint.staging_folder import staging_folder_path
from surefoot.entrypoint import RECIPE_MODULE, check_entrypoint, is_recipe, require_package
from surefoot.errors import StagingTooSmall, UsageError
from surefoot.initial_weights import check_init_from
from surefoot.spec import JobSpec, RecipeSpec

BYTES_PER_PARAMETER = 12
"""A float32 weight and the two float32 moments of AdamW."""
SHARD_HEADER_BYTES = 64 * 1024
MARGIN_RATIO = 1.05
"""Tensors do not share out over the ranks exactly."""
RANK_VARIABLES = frozenset({
    "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE",
    "SUREFOOT_CAUSE", "SUREFOOT_FROM_SEED", "SUREFOOT_JOB_KEY", "SUREFOOT_SPEC", "SUREFOOT_WRITER_PRUNES",
})  # fmt: skip
"""Set by the launcher for each rank; a value from the spec would break the job."""


def check(spec: JobSpec) -> JobSpec:
    """Say whether the job can be started on this machine; start and write nothing.

    Returns:
        The spec, with the default `recipe` section filled in when the entrypoint is the built-in recipe.

    Raises:
        UsageError: names the first key that is wrong and what is allowed.
        StagingTooSmall: staging_dir cannot hold the snapshot buffers.
    """
    if is_recipe(spec) and spec.recipe is None:
        spec = spec.model_copy(update={"recipe": RecipeSpec()})
    for check_key in CHECKS:
        check_key(spec)
    return spec


def _check_not_running(spec: JobSpec) -> None:
    folder = staging_folder_path(spec.checkpoint.staging_dir, spec.job, spec.storage)
    pid = holder_pid(folder / "launcher.lock")
    if pid is not None:
        raise UsageError("job", f"is already being run by process {pid}: wait for it, stop it, or give another name")


def _check_recipe(spec: JobSpec) -> None:
    if spec.recipe is not None and not is_recipe(spec):
        raise UsageError(
            "recipe",
            "only the built-in recipe reads this section; remove it, or use "
            f"`entrypoint: -m {RECIPE_MODULE}` (entrypoint is {spec.entrypoint!r})",
        )


def _check_dependencies(spec: JobSpec) -> None:
    require_package("torch", "pip install 'surefoot[torch]'")
    if is_recipe(spec):
        require_package("transformers", "pip install surefoot-worker")
        require_package("tokenizers", "pip install surefoot-worker")


def _check_data(spec: JobSpec) -> None:
    if spec.recipe is None or spec.recipe.data is None:
        return
    data, key = spec.recipe.data, "recipe.data"
    allowed = "allowed: a folder of text files, a text file, or null for the standard library's source"
    if not os.path.lexists(data):
        raise UsageError(key, f"{data} does not exist; {allowed}")
    if not os.access(data, os.R_OK | (os.X_OK if data.is_dir() else 0)):
        raise UsageError(key, f"{data} cannot be read by this user; {allowed}")
    if data.is_dir() and not any(path.is_file() for path in data.rglob("*")):
        raise UsageError(key, f"{data} holds no file; {allowed}")
    if not data.is_dir() and not (data.is_file() and data.stat().st_size > 0):
        raise UsageError(key, f"{data} is empty or not a regular file; {allowed}")


def _check_batch(spec: JobSpec) -> None:
    recipe = spec.recipe
    if recipe is not None and recipe.global_batch_size < spec.nproc_per_node:
        raise UsageError(
            "recipe.global_batch_size",
            f"is {recipe.global_batch_size} for {spec.nproc_per_node} ranks; each rank needs a sample of every "
            f"batch: allowed is {spec.nproc_per_node} and more",
        )


def _check_environment(spec: JobSpec) -> None:
    for name, value in spec.env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
            raise UsageError(f"env.{name}", "must be a shell variable name with a value that has no NUL byte")
        if name in RANK_VARIABLES:
            raise UsageError(f"env.{name}", "is set by the launcher for each rank; remove it")


def _check_storage(spec: JobSpec) -> None:
    require_writable("storage", spec.storage / spec.job)


def _check_storage_room(spec: JobSpec) -> None:
    """Refuse what will not fit. The size of an own script's state is not known here; the sdk asks when it is."""
    folder = spec.storage / spec.job
    if spec.recipe is None or (folder / ATTEMPTS_FOLDER).is_dir():  # a job that goes on meets a full disk better
        return
    checkpoint = spec.checkpoint
    check_storage_room(
        folder,
        checkpoint.retention,
        spec.recipe.model.num_parameters() * BYTES_PER_PARAMETER,
        num_steps=spec.recipe.steps,
        save_every_steps=checkpoint.save_every_steps if checkpoint.save_every_seconds is None else None,
    )


def _check_run_dir(spec: JobSpec) -> None:
    require_writable("run_dir", spec.job_run_dir)


def _check_cache_dir(spec: JobSpec) -> None:
    if spec.recipe is not None:
        require_writable("recipe.cache_dir", spec.recipe.cache_dir)


def _check_num_buffers(spec: JobSpec) -> None:
    checkpoint = spec.checkpoint
    if checkpoint.snapshot_every_steps > 0 and checkpoint.num_buffers < 3:
        raise UsageError(
            "checkpoint.num_buffers",
            f"is {checkpoint.num_buffers}; snapshots between saves (checkpoint.snapshot_every_steps: "
            f"{checkpoint.snapshot_every_steps}) need 3 and more, or set snapshot_every_steps to 0",
        )


def _check_staging_dir(spec: JobSpec) -> None:
    key, directory = "checkpoint.staging_dir", spec.checkpoint.staging_dir
    if not os.path.lexists(directory):
        raise UsageError(key, f"{directory} does not exist; allowed: an existing folder, best on tmpfs (/dev/shm)")
    require_writable(key, directory)
    needed, available = staging_bytes_needed(spec), staging_bytes_available(spec)
    if needed > available:
        raise StagingTooSmall(str(directory), needed, available)


CHECKS: tuple[Callable[[JobSpec], None], ...] = (
    check_entrypoint,
    _check_recipe,
    _check_dependencies,
    _check_data,
    check_init_from,
    _check_batch,
    _check_environment,
    _check_storage,
    _check_run_dir,
    _check_cache_dir,
    _check_num_buffers,
    _check_staging_dir,
    _check_storage_room,
    _check_not_running,
)


def staging_bytes_needed(spec: JobSpec) -> int:
    """Return the bytes that the snapshot buffers of all ranks of this node take.

    The state is shared out over the ranks, so it counts once. For an own script only the overhead is known here;
    the sdk checks again when it has seen the model.
    """
    num_parameters = 0 if spec.recipe is None else spec.recipe.model.num_parameters()
    shard_bytes = int(num_parameters * BYTES_PER_PARAMETER * MARGIN_RATIO) // spec.nproc_per_node + SHARD_HEADER_BYTES
    return spec.nproc_per_node * required_bytes(shard_bytes, spec.checkpoint.num_buffers)


def staging_bytes_available(spec: JobSpec) -> int:
    """Return the bytes free in staging_dir, with those of this job's buffers, which are used again."""
    folder = staging_folder_path(spec.checkpoint.staging_dir, spec.job, spec.storage.absolute())
    reused = sum(path.stat().st_blocks * 512 for path in folder.glob("*") if path.is_file())
    return free_bytes(spec.checkpoint.staging_dir) + reused


def require_writable(key: str, path: Path) -> None:
    """Refuse a folder that cannot be written in, or made; make nothing.

    Raises:
        UsageError: names `key`.
    """
    allowed = "allowed: a folder that this user can write in or create"
    if "\0" in str(path) or path.parts[:1] == ("~",):
        raise UsageError(key, f"{str(path)!r} is not a plain path (~ is not expanded); {allowed}")
    ancestor = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    if not ancestor.is_dir():
        raise UsageError(key, f"{ancestor} is not a directory; {allowed}")
    try:
        # A nameless file (O_TMPFILE): also right about read-only mounts and root, and it leaves nothing.
        with tempfile.TemporaryFile(dir=ancestor):
            pass
    except OSError as error:
        raise UsageError(key, f"{path} cannot be written ({error.strerror}); {allowed}") from None
