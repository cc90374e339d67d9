"""Paths in a spec mean something only in the folder of whoever wrote it; what is sent elsewhere must be absolute."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from surefoot.entrypoint import is_recipe
from surefoot.spec import JobSpec


def with_absolute_paths(spec: JobSpec, folder: Path) -> JobSpec:
    """Return the same spec with every path that is set absolute; keys that are not set stay so.

    Args:
        spec: What relative paths are in: keys, the script of the entrypoint, PYTHONPATH. A module given with `-m` is
            looked for in `folder` first, as `python -m` does.
        folder: An absolute path that they are relative to.
    """
    update: dict[str, Any] = _absolute(spec, folder)
    words = _words(spec)
    python_path = [str(folder / part) for part in spec.env.get("PYTHONPATH", "").split(":") if part]
    if words and words[0] == "-m" and not is_recipe(spec):
        python_path.insert(0, str(folder))
    elif words and words[0] != "-m":
        update["entrypoint"] = shlex.join([str(folder / words[0]), *words[1:]])
    if python_path:
        update["env"] = spec.env | {"PYTHONPATH": ":".join(python_path)}
    return spec.model_copy(update=update)


def relative_path_keys(spec: JobSpec) -> Iterator[str]:
    """Yield the keys whose paths are relative, those with a default included."""
    words = _words(spec)
    if words and words[0] != "-m" and not Path(words[0]).is_absolute():
        yield "entrypoint"
    if any(part and not Path(part).is_absolute() for part in spec.env.get("PYTHONPATH", "").split(":")):
        yield "env.PYTHONPATH"
    yield from _relative_keys(spec, "")


def _words(spec: JobSpec) -> list[str]:
    try:
        return spec.entrypoint_words
    except ValueError:  # quotes that do not match: `preflight` says so
        return []


def _absolute(section: BaseModel, folder: Path) -> dict[str, Any]:
    update: dict[str, Any] = {}
    for name in section.model_fields_set:
        value = getattr(section, name)
        if isinstance(value, Path):
            update[name] = folder / value
        elif isinstance(value, BaseModel):
            update[name] = value.model_copy(update=_absolute(value, folder))
    return update


def _relative_keys(section: BaseModel, prefix: str) -> Iterator[str]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Path) and not value.is_absolute():
            yield f"{prefix}{name}"
        elif isinstance(value, BaseModel):
            yield from _relative_keys(value, f"{prefix}{name}.")
