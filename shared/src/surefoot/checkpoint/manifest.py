"""What a committed checkpoint consists of. Pure: bytes in, bytes out.

The manifest is a function of the part files and nothing else (no clock, no host, no order of arrival), so two
writers that see the same parts make the same bytes and it does not matter which of them wins the rename.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from surefoot.checkpoint.ids import CheckpointId
from surefoot.errors import CheckpointError, DamagedCheckpoint
from surefoot.parsing import parse_json

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 1

_XXH3_128_PATTERN = r"^[0-9a-f]{32}$"


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


_D = TypeVar("_D", bound=_Document)


class ShardPart(_Document):
    """One rank's part of a checkpoint: `rank-00000.json`, written once its shard is durable."""

    version: Literal[1] = 1
    job: str
    attempt: int = Field(ge=0)
    step: int = Field(ge=0)
    world_size: int = Field(ge=1)
    rank: int = Field(ge=0)
    plan_digest: str
    """Hex digest of the layouts of all ranks: parts belong together exactly when it is equal."""
    file: str
    num_bytes: int = Field(ge=0)
    xxh3_128: str = Field(pattern=_XXH3_128_PATTERN)
    scalars: dict[str, Any] | None = None
    """State that is not tensors, of rank 0 only. NaN and Infinity stay what Python's json makes of them."""


class FileEntry(_Document):
    """A file that belongs to a checkpoint."""

    file: str
    num_bytes: int = Field(ge=0)
    xxh3_128: str = Field(pattern=_XXH3_128_PATTERN)


class Manifest(_Document):
    """The commit: every file of the checkpoint but itself, and a checksum of itself."""

    version: Literal[1] = 1
    job: str
    attempt: int = Field(ge=0)
    step: int = Field(ge=0)
    world_size: int = Field(ge=1)
    plan_digest: str
    files: tuple[FileEntry, ...]
    """In rank order, each rank's shard before its part file."""
    checksum: str = ""
    """XXH3-128 of the encoding with this field empty."""

    @property
    def checkpoint_id(self) -> CheckpointId:
        """Which checkpoint this commits."""
        return CheckpointId(self.attempt, self.step)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(entry.num_bytes for entry in self.files)

    def shard(self, rank: int) -> FileEntry:
        """Return the entry of a rank's shard."""
        return self.files[2 * rank]

    def part(self, rank: int) -> FileEntry:
        """Return the entry of a rank's part file."""
        return self.files[2 * rank + 1]


def shard_file(rank: int) -> str:
    """Return the name of a rank's shard in the folder of its checkpoint."""
    return f"rank-{rank:05d}.safetensors"


def part_file(rank: int) -> str:
    """Return the name of a rank's part file in the folder of its checkpoint."""
    return f"rank-{rank:05d}.json"


def checksum(data: bytes | memoryview) -> str:
    """Return the XXH3-128 as hex, the checksum used for every file."""
    return xxhash.xxh3_128_hexdigest(data)


def encode_part(part: ShardPart) -> bytes:
    """Return the content of a part file."""
    return _encode(part)


def decode_part(data: bytes, path: str) -> ShardPart:
    """Return the part that `data`, read from `path`, holds.

    Raises:
        DamagedCheckpoint: it is not a part; names `path`.
    """
    return _decode(ShardPart, data, path)


def build_manifest(parts: Iterable[tuple[bytes, ShardPart]]) -> Manifest:
    """Return the manifest of a checkpoint from the content of its part files, in any order.

    Raises:
        CheckpointError: a rank is missing or double, parts disagree, or rank 0 has no scalars.
    """
    by_rank = sorted(parts, key=lambda pair: pair[1].rank)
    if not by_rank:
        raise CheckpointError("a checkpoint needs at least one part")
    first = by_rank[0][1]
    _check_belong_together(first, [part for _, part in by_rank])
    files: list[FileEntry] = []
    for data, part in by_rank:
        files.append(FileEntry(file=part.file, num_bytes=part.num_bytes, xxh3_128=part.xxh3_128))
        files.append(FileEntry(file=part_file(part.rank), num_bytes=len(data), xxh3_128=checksum(data)))
    manifest = Manifest(
        job=first.job,
        attempt=first.attempt,
        step=first.step,
        world_size=first.world_size,
        plan_digest=first.plan_digest,
        files=tuple(files),
    )
    return manifest.model_copy(update={"checksum": checksum(_encode(manifest))})


def _check_belong_together(first: ShardPart, parts: list[ShardPart]) -> None:
    where = f"step {first.step} of attempt {first.attempt}"
    ranks = [part.rank for part in parts]
    if len(ranks) != first.world_size or ranks != list(range(first.world_size)):
        raise CheckpointError(f"{where}: parts of ranks {ranks}, but the world size is {first.world_size}")
    for part in parts:
        for name in ("job", "attempt", "step", "world_size", "plan_digest"):
            ours, theirs = getattr(first, name), getattr(part, name)
            if ours != theirs:
                raise CheckpointError(f"{where}: {name} is {ours!r} on rank 0 and {theirs!r} on rank {part.rank}")
        if part.file != shard_file(part.rank):
            raise CheckpointError(f"{where}: rank {part.rank} calls its shard {part.file!r}")
        if (part.scalars is None) != (part.rank > 0):
            raise CheckpointError(f"{where}: scalars belong to rank 0 and only there (rank {part.rank})")


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the content of manifest.json."""
    return _encode(manifest)


def decode_manifest(data: bytes, path: str) -> Manifest:
    """Return the manifest that `data`, read from `path`, holds.

    Raises:
        DamagedCheckpoint: any byte is not what was written; names `path`.
        CheckpointError: a newer version of the format.
    """
    manifest = _decode(Manifest, data, path)
    if manifest.checksum != checksum(_encode(manifest.model_copy(update={"checksum": ""}))):
        raise DamagedCheckpoint(path, "its checksum of itself does not match")
    # Catches what JSON forgives: another spelling of the same value.
    if _encode(manifest) != data:
        raise DamagedCheckpoint(path, "is not spelled as it was written")
    if not _lists_its_files(manifest):
        raise DamagedCheckpoint(path, f"does not list the files of {manifest.world_size} ranks")
    return manifest


def _lists_its_files(manifest: Manifest) -> bool:
    # The number first: a world size of a billion must not cost a list of that many names.
    if len(manifest.files) != 2 * manifest.world_size:
        return False
    expected = (name for rank in range(manifest.world_size) for name in (shard_file(rank), part_file(rank)))
    return all(entry.file == name for entry, name in zip(manifest.files, expected, strict=True))


def _encode(document: _Document) -> bytes:
    # Not sorted: the order of fields is fixed and the order of keys in the user's scalars is theirs.
    return json.dumps(document.model_dump(), separators=(",", ":")).encode("ascii") + b"\n"


def _decode(cls: type[_D], data: bytes, path: str) -> _D:
    try:
        content = parse_json(data)
        version = content.get("version") if isinstance(content, dict) else None
        if isinstance(version, int) and version > FORMAT_VERSION:
            # Not damage: it must be left in place for the program that wrote it.
            raise CheckpointError(f"{path}: has format version {version}; this Surefoot reads up to {FORMAT_VERSION}")
        return cls.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise DamagedCheckpoint(path, f"{field}: {first['msg']}") from None
    except ValueError as error:
        raise DamagedCheckpoint(path, f"is not JSON: {error}") from None
