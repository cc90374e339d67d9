"""The tokenizer that goes beside exported weights: the job's own, or one that a person names."""

from __future__ import annotations

import json
from pathlib import Path

from surefoot.checkpoint.hugging_face import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, TOKENIZER_FILES
from surefoot.checkpoint.manifest import checksum
from surefoot.errors import UsageError
from surefoot.parsing import parse_json

_GENERIC_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast"}
"""Without it transformers takes the class of the model's type, which may split text in its own way."""


def find_tokenizer(wanted: Path | None, known: tuple[Path, str] | None) -> tuple[dict[str, bytes], str]:
    """Return the files to write by name, and a note for people when the job's own cannot be had.

    Args:
        wanted: A tokenizer.json, or a folder with one; None: the job's own.
        known: (path, XXH3-128) of the job's own.

    Raises:
        UsageError: `wanted` is neither; names the option.
        OSError: a file cannot be read.
    """
    if wanted is not None:
        return _read(wanted), ""
    if known is None:
        return {}, "no tokenizer: the job names none; give one with --tokenizer"
    path, digest = known
    try:
        files = _read(path)
    except (UsageError, OSError):
        return {}, f"no tokenizer: {path} is not on this machine; give it with --tokenizer"
    if checksum(files[TOKENIZER_FILE]) != digest:
        return {}, f"no tokenizer: {path} has changed since the checkpoint was made; give it with --tokenizer"
    return files, ""


def _read(path: Path) -> dict[str, bytes]:
    folder = path if path.is_dir() else path.parent
    main = path / TOKENIZER_FILE if path.is_dir() else path
    allowed = f"allowed: a {TOKENIZER_FILE} of the tokenizers library, or a folder with one"
    if not main.is_file():
        raise UsageError("--tokenizer", f"{path} is none; {allowed}")
    content = main.read_bytes()
    try:
        is_tokenizer = "model" in parse_json(content)
    except (ValueError, TypeError):
        is_tokenizer = False
    if not is_tokenizer:
        raise UsageError("--tokenizer", f"{main} is none; {allowed}")
    files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
    files[TOKENIZER_FILE] = content
    files.setdefault(TOKENIZER_CONFIG_FILE, json.dumps(_GENERIC_CONFIG, indent=2).encode() + b"\n")
    return files
