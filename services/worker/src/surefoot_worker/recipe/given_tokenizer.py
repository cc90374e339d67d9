"""The tokenizer of a Hugging Face folder, for a job whose weights come from there (`init_from`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surefoot.checkpoint.hugging_face import CONFIG_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, TOKENIZER_FILES
from surefoot.errors import UsageError

KEY = "init_from"


def find_given_tokenizer(init_from: Path | None) -> Path | None:
    """Return the folder when it has a tokenizer, None when the recipe is to train one.

    Raises:
        UsageError: there is no such folder, so nobody can tell.
    """
    if init_from is None:
        return None
    if not init_from.is_dir():
        problem = f"{init_from} is not a folder; the recipe needs it at every start, since the data is made with its"
        raise UsageError(KEY, f"{problem} {TOKENIZER_FILE}")
    return init_from if (init_from / TOKENIZER_FILE).is_file() else None


def describe_files(folder: Path) -> list[list[Any]]:
    """Return what the tokens depend on, without reading it: names, sizes and times."""
    stats = [(name, folder / name) for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, CONFIG_FILE)]
    return [[name, path.stat().st_size, path.stat().st_mtime_ns] for name, path in stats if path.is_file()]


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the tokenizer's files by name, to be kept with the tokens."""
    return {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
