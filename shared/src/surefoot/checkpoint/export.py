"""A checkpoint's model as a Hugging Face folder, which `AutoModelForCausalLM.from_pretrained` opens. Torch-free.

Where everything goes is decided from the headers of the shards; then each shard is streamed once, every byte of it goes
through the checksum, and what belongs to the model is written to its place. So nothing is exported that was not
verified, parts of sharded tensors come together, and it takes the memory of one piece (8 MiB) however large the model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from surefoot.checkpoint import export_files
from surefoot.checkpoint.catalog import read_layout, read_manifest, read_scalars, verify_shard
from surefoot.checkpoint.hugging_face import CONFIG_FILE, MODEL_PREFIX, hugging_face_name
from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.checkpoint.layout import DTYPE_BYTES, ShardLayout
from surefoot.checkpoint.manifest import Manifest
from surefoot.checkpoint.placement import Placement
from surefoot.checkpoint.regions import Box, StoredTensor, merge_layouts
from surefoot.checkpoint.store import PIECE_BYTES, Store
from surefoot.checkpoint.tokenizer_files import find_tokenizer
from surefoot.errors import CheckpointError, DamagedCheckpoint, UsageError
from surefoot.faultpoints import reach

DEFAULT_FILE_BYTES = 5 * 10**9

_TORCH_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class ModelFacts(NamedTuple):
    """What a checkpoint knows about its model beside the tensors; the sdk stores it as `hf_config` of the scalars.

    Attributes:
        config: Content of config.json.
        tied_names: Tensors that transformers makes by tying when it loads the model, so that they are not stored.
        tokenizer: (path, XXH3-128) of the tokenizer.json that belongs to the data, where the script named one.
    """

    config: dict[str, Any]
    tied_names: frozenset[str] = frozenset()
    tokenizer: tuple[Path, str] | None = None

    @classmethod
    def parse(cls, value: object) -> ModelFacts | None:
        """Return what `hf_config` holds; None for null, or what this version does not know."""
        if not isinstance(value, dict) or not isinstance(value.get("config"), dict):
            return None
        tokenizer = value.get("tokenizer")
        place = None if tokenizer is None else (Path(tokenizer["path"]), str(tokenizer["xxh3_128"]))
        return cls(value["config"], frozenset(value.get("tied_names", ())), place)


class Exported(NamedTuple):
    """What was written.

    Attributes:
        folder: The new folder.
        files: Names of its files.
        num_tensors: Tensors in it.
        num_bytes: Bytes of these.
        note: What a person should know about the tokenizer; "" when all is as it should be.
    """

    folder: Path
    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    note: str


class _Tensor(NamedTuple):
    """A tensor of the model, and the names it gets in the folder."""

    stored: StoredTensor
    names: tuple[str, ...]


def export_checkpoint(
    store: Store,
    checkpoint: CheckpointId,
    target: Path,
    *,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    config: Mapping[str, Any] | None = None,
    tokenizer: Path | None = None,
) -> Exported:
    """Write the model of a committed checkpoint as a Hugging Face folder, durable on return. Any process.

    The folder appears whole or not at all. Names, dtypes and tied weights are as `save_pretrained` writes them.

    Args:
        store: Storage of the job.
        checkpoint: Which one.
        target: The new folder; there must be nothing, or an empty folder. Parents appear.
        max_file_bytes: Weights are split into files of at most so many bytes (one tensor at least).
        config: Content of config.json, instead of what the checkpoint holds.
        tokenizer: A tokenizer.json, or a folder with one, to put beside the weights instead of the job's own.

    Raises:
        UsageError: `target` is taken, the checkpoint has no model config, or `tokenizer` is none.
        DamagedCheckpoint: the checkpoint is not as it was written.
        CheckpointError: it holds no model that can be exported.
        OSError: a disk fails or is full.
    """
    export_files.check_free(target)
    manifest = read_manifest(store, checkpoint)
    facts = _facts(read_scalars(store, checkpoint), config)
    tokenizer_files, note = find_tokenizer(tokenizer, facts.tokenizer)
    shards = [_Shard.open(store, manifest, rank) for rank in range(manifest.world_size)]
    tensors = _collect([shard.layout for shard in shards], facts.tied_names)
    described = {name: (t.stored.dtype, t.stored.shape) for t in tensors.values() for name in t.names}
    files = export_files.share_out(described, max_file_bytes)
    with export_files.new_folder(target) as folder:
        with export_files.weight_files(folder, files) as targets:
            for shard in shards:
                _copy_shard(shard, tensors, targets)
                reach("export.shard_written")
        export_files.write_json(folder / CONFIG_FILE, _with_dtype(facts.config, tensors.values()))
        export_files.write_index(folder, files)
        for name, content in tokenizer_files.items():
            export_files.write_file(folder / name, content)
        names = tuple(sorted(path.name for path in folder.iterdir()))
    num_bytes = sum(place.num_bytes for places in files.values() for place in places.values())
    return Exported(target, names, len(described), num_bytes, note)


def _facts(scalars: Mapping[str, Any], config: Mapping[str, Any] | None) -> ModelFacts:
    facts = ModelFacts.parse(scalars.get("hf_config"))
    if config is not None:
        return facts._replace(config=dict(config)) if facts else ModelFacts(dict(config))
    if facts is None:
        raise UsageError(
            "--config",
            "is needed: the checkpoint holds no model config, since the model it was made from has no `.config` of "
            "transformers, or an older Surefoot made it; allowed: a config.json that describes it",
        )
    return facts


def _with_dtype(config: Mapping[str, Any], tensors: Iterable[_Tensor]) -> dict[str, Any]:
    """Return the config with the dtype that most of the weights have: what a reader computes in by default."""
    num_items = Counter[str]()
    for stored in (tensor.stored for tensor in tensors):
        if stored.dtype in _TORCH_DTYPES:
            num_items[_TORCH_DTYPES[stored.dtype]] += math.prod(stored.shape)
    dtype = {"dtype": num_items.most_common(1)[0][0]} if num_items else {}
    return dict(sorted((dict(config) | dtype).items()))


def _collect(layouts: Sequence[ShardLayout], tied_names: Collection[str]) -> dict[str, _Tensor]:
    """Return the model's tensors by stored name, with the names that each gets in the folder. Pure.

    Raises:
        CheckpointError: there is none, or the parts of one are not all there.
    """
    by_name = {name: t for name, t in merge_layouts(layouts).items() if name.startswith(MODEL_PREFIX)}
    if not by_name:
        raise CheckpointError("the checkpoint holds no tensor of a model")
    groups: dict[str, list[str]] = {}
    for name, stored in sorted(by_name.items(), key=lambda item: item[0] != item[1].name):  # its own name first
        groups.setdefault(stored.name, []).append(hugging_face_name(name.removeprefix(MODEL_PREFIX)))
    # What transformers does not tie again by itself is written under each of its names.
    chosen = {stored: tuple(name for name in names if name not in tied_names) for stored, names in groups.items()}
    return {stored: _Tensor(by_name[stored], chosen[stored] or (names[0],)) for stored, names in groups.items()}


@dataclass(frozen=True)
class _Shard:
    """A shard to stream, with its layout as it was when the export was planned."""

    store: Store
    manifest: Manifest
    rank: int
    layout: ShardLayout

    @classmethod
    def open(cls, store: Store, manifest: Manifest, rank: int) -> _Shard:
        """Read the layout; it is verified only when the shard is streamed."""
        try:
            return cls(store, manifest, rank, read_layout(store, manifest, rank))
        except DamagedCheckpoint:
            raise
        except CheckpointError:
            verify_shard(store, manifest, rank)  # that it is damaged is the better answer
            raise

    def stream(self) -> Iterator[tuple[int, memoryview]]:
        """Yield (offset, piece) from the first byte to the last.

        Raises:
            DamagedCheckpoint: at the end, when it was not what was written.
        """
        entry = self.manifest.shard(self.rank)
        key = f"{folder_name(self.manifest.checkpoint_id)}/{entry.file}"
        digest = xxhash.xxh3_128()
        memory, offset = memoryview(bytearray(PIECE_BYTES)), 0
        with self.store.read(key) as file:
            while num_bytes := file.readinto(memory):
                piece = memory[:num_bytes]
                known = memoryview(self.layout.header)[offset : offset + num_bytes]
                if piece[: len(known)] != known:
                    raise DamagedCheckpoint(f"{self.store}/{key}", "changed while it was read")
                digest.update(piece)
                yield offset, piece
                offset += num_bytes
        if offset != entry.num_bytes:
            raise DamagedCheckpoint(f"{self.store}/{key}", f"has {offset} bytes instead of {entry.num_bytes}")
        if digest.hexdigest() != entry.xxh3_128:
            problem = f"has checksum {digest.hexdigest()} instead of {entry.xxh3_128}"
            raise DamagedCheckpoint(f"{self.store}/{key}", problem)


def _copy_shard(shard: _Shard, tensors: Mapping[str, _Tensor], targets: Mapping[str, export_files.Target]) -> None:
    """Stream a shard and write what belongs to the model to its places."""
    entries = iter([entry for entry in shard.layout.entries if entry.name in tensors and entry.num_bytes])
    entry = next(entries, None)
    for offset, piece in shard.stream():
        end = offset + len(piece)
        while entry is not None and (start := shard.layout.header_bytes + entry.offset) < end:
            tensor = tensors[entry.name]
            placement = Placement(
                entry.shape, tensor.stored.shape, Box.of(entry).offset, DTYPE_BYTES[entry.dtype]
            )
            for part in placement.pieces(max(0, offset - start), min(entry.num_bytes, end - start)):
                data = piece[start + part.start - offset : start + part.stop - offset]
                for name in tensor.names:
                    targets[name].write(part.at, data)
            if start + entry.num_bytes > end:
                break  # the next piece holds more of it
            entry = next(entries, None)
