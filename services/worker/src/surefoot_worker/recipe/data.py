"""Text to tokens, once: trains a tokenizer, tokenizes, keeps both in a cache that all later starts read.

    <cache_dir>/<key>/tokenizer.json train.tokens validation.tokens prepared.json
    <cache_dir>/<key>.lock           held by the process that prepares; the kernel frees it when that dies
    <cache_dir>/.<key>.tmp-<pid>/    being made; renamed when complete, so that a folder of the first kind is whole

The key is a digest of everything the result depends on: names, sizes and times of the files, vocabulary size, the
tokenizer of `init_from` where it has one, version of this code. A start with a warm cache only looks at these (3 ms for
the standard library).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from surefoot.checkpoint.store import sync_folder
from surefoot.errors import UsageError
from surefoot.faultpoints import reach
from surefoot.sdk.data.tokens import TokenFile, write_tokens
from surefoot.spec import RecipeSpec
from surefoot_worker.recipe.corpus import SourceFile, find_source_files, in_hash_order, split
from surefoot_worker.recipe.given_tokenizer import describe_files, find_given_tokenizer, read_files

Report = Callable[[str, str, float], None]
"""Takes (stage, what was done, seconds) when a stage ends."""

_VERSION = 1
"""Part of the key: counted up when the same text would give other tokens."""


@dataclass(frozen=True)
class PreparedData:
    """Where the tokens are, and what they are."""

    tokenizer_path: Path
    """In the format of the `tokenizers` library."""
    train_path: Path
    """For `surefoot.sdk.data.tokens.TokenFile`, as is `validation_path`."""
    validation_path: Path
    """Text that is not in `train_path`. May be shorter than one sequence where there is little text."""
    vocab_size: int
    """Of the tokenizer: at most the model's, less where the text has too few different pairs."""
    num_tokens: int
    """In `train_path`."""
    digest: str
    """xxh3-128 of `train_path`'s content: equal digests train on the same tokens."""


def prepare(spec: RecipeSpec, report: Report, init_from: Path | None = None) -> PreparedData:
    """Return the recipe's tokens, from the cache or freshly made.

    Every rank may call it at once: one prepares, the others wait for it. Killed in the middle it leaves nothing
    that a later call would take for complete.

    Args:
        spec: Its data, cache_dir, model.vocab_size, sequence_length and global_batch_size are used.
        report: Called after each stage that was done here; not called when the cache was warm.
        init_from: A Hugging Face folder; its tokenizer is used where it has one.

    Raises:
        UsageError: `recipe.data` holds no text, or too little for one global batch; or `recipe.cache_dir` cannot
            be written; or the tokenizer of `init_from` cannot be used.
    """
    files = find_source_files(spec.data)
    given = find_given_tokenizer(init_from)
    folder = spec.cache_dir / _key(files, spec.model.vocab_size, given)
    prepared = _read(folder)
    if prepared is None:
        try:
            with _locked(folder.with_name(folder.name + ".lock")):
                prepared = _read(folder) or _prepare(files, spec.model.vocab_size, given, folder, report)
        except OSError as error:
            raise UsageError("recipe.cache_dir", f"{spec.cache_dir} cannot be used: {error.strerror}") from error
    _check_enough(prepared, spec)
    return prepared


def _key(files: Sequence[SourceFile], vocab_size: int, given: Path | None) -> str:
    listed = [(file.name, file.num_bytes, file.mtime_ns) for file in files]
    depends_on: list[object] = [_VERSION, vocab_size, listed]
    if given is not None:
        depends_on.append(describe_files(given))
    return hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()[:32]


def _read(folder: Path) -> PreparedData | None:
    """Return what the folder holds; None if it is not there or not usable."""
    try:
        about = json.loads((folder / "prepared.json").read_bytes())
        train, validation = (TokenFile(folder / name, 1) for name in ("train.tokens", "validation.tokens"))
        tokenizer_path = folder / "tokenizer.json"
        if not tokenizer_path.stat().st_size or train.num_tokens != about["num_tokens"]:
            return None
        return PreparedData(
            tokenizer_path, train.path, validation.path, about["vocab_size"], train.num_tokens, about["digest"]
        )
    except (OSError, ValueError, KeyError, TypeError, UsageError):
        # Whatever is wrong with it, making it again puts it right.
        return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _prepare(
    files: Sequence[SourceFile], vocab_size: int, given: Path | None, folder: Path, report: Report
) -> PreparedData:
    for debris in folder.parent.glob(f".{folder.name}.tmp-*"):
        shutil.rmtree(debris)
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    temporary.mkdir()
    try:
        _make(files, vocab_size, given, temporary, report)
        # Only there when it is not usable.
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        reach("recipe.renamed")
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    prepared = _read(folder)
    assert prepared is not None
    return prepared


def _make(files: Sequence[SourceFile], vocab_size: int, given: Path | None, folder: Path, report: Report) -> None:
    from surefoot_worker.recipe.tokenizing import END_OF_TEXT, encode, load_given_tokenizer, train_tokenizer

    start = time.monotonic()
    training, validation = split(files)
    num_megabytes = sum(file.num_bytes for file in files) / 1e6
    if given is None:
        by_file = {piece.file: piece for piece in training}
        tokenizer = train_tokenizer((by_file[f] for f in in_hash_order(list(by_file))), vocab_size)
        end_of_text = END_OF_TEXT
        _write(folder / "tokenizer.json", tokenizer.to_str().encode())
        origin = f"from {num_megabytes:,.1f} MB in {len(files):,} files"
    else:
        tokenizer, end_of_text = load_given_tokenizer(given, vocab_size)
        for name, content in read_files(given).items():
            _write(folder / name, content)
        origin = f"of {given}"
    reach("recipe.tokenizer_written")
    trained = time.monotonic()
    report("tokenizer", f"{tokenizer.get_vocab_size():,} tokens {origin}", trained - start)

    bytes_per_token = 2 if vocab_size <= 2**16 else 4
    num_training, num_validation = (
        write_tokens(folder / name, encode(tokenizer, pieces, end_of_text), bytes_per_token=bytes_per_token)
        for name, pieces in (("train.tokens", training), ("validation.tokens", validation))
    )
    reach("recipe.tokens_written")
    about = {
        "vocab_size": tokenizer.get_vocab_size(),
        "num_tokens": num_training,
        "digest": _digest(folder / "train.tokens"),
    }
    _write(folder / "prepared.json", json.dumps(about).encode())
    sync_folder(folder)
    report("tokens", f"{num_training:,} to train, {num_validation:,} to validate", time.monotonic() - trained)


def _check_enough(prepared: PreparedData, spec: RecipeSpec) -> None:
    num_samples = prepared.num_tokens // spec.sequence_length
    if num_samples < spec.global_batch_size:
        raise UsageError(
            "recipe.data",
            f"{spec.data or 'the standard library'} gives {prepared.num_tokens:,} tokens, {num_samples:,} samples of "
            f"sequence_length {spec.sequence_length}; one global batch needs {spec.global_batch_size:,}: give more "
            "text, or lower recipe.sequence_length or recipe.global_batch_size",
        )


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while data := file.read(2**20):
            digest.update(data)
    return digest.hexdigest()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
