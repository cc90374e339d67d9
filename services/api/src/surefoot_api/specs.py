"""A submitted spec, checked before anything is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from surefoot import preflight
from surefoot.entrypoint import is_recipe
from surefoot.errors import UsageError
from surefoot.spec import JobSpec, RecipeSpec, parse_spec
from surefoot.spec_paths import relative_path_keys
from surefoot_api.problems import ProblemError


def parse(data: dict[str, Any], home: Path) -> JobSpec:
    """Return a submitted spec, with the stack's own folders where it names none.

    Args:
        data: As it came.
        home: The stack's folder, absolute.

    Raises:
        UsageError: names the key that is wrong.
    """
    try:
        # Python's JSON also reads NaN, Infinity and halves of surrogate pairs; databases and other readers do not.
        json.dumps(data, allow_nan=False, ensure_ascii=False).encode()
    except ValueError as error:
        raise UsageError("spec", f"holds what JSON cannot: {error}") from None
    spec = parse_spec({"storage": str(home / "checkpoints"), "run_dir": str(home / "run")} | data)
    try:
        return _with_absolute_cache(spec, home)
    except ValueError as error:
        raise UsageError("entrypoint", f"cannot be split into words: {error}") from None


def _with_absolute_cache(spec: JobSpec, home: Path) -> JobSpec:
    if is_recipe(spec):
        recipe = spec.recipe or RecipeSpec()
        if "cache_dir" not in recipe.model_fields_set:
            recipe = recipe.model_copy(update={"cache_dir": home / "data"})
        spec = spec.model_copy(update={"recipe": recipe})
    for key in relative_path_keys(spec):
        raise UsageError(key, "must be an absolute path: the api does not know the folder that it is relative to")
    return spec


def check_startable(spec: JobSpec) -> None:
    """Refuse a job that this machine cannot start.

    Raises:
        UsageError: names the key that is wrong.
        ProblemError: processes of the job are still there.
    """
    try:
        preflight.check(spec)
    except UsageError as error:
        if error.key == "job":
            raise ProblemError(409, "job_active", str(error)) from None
        raise


def to_row(spec: JobSpec) -> dict[str, Any]:
    """Return the form that is kept: only keys that are set, since those win over what the script itself says."""
    return spec.model_dump(mode="json", exclude_unset=True)
