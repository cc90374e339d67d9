"""What the machine itself takes for the bytes of a checkpoint: copies between warm memory, O_DIRECT write and fsync.

    python -m bench.checkpoint_floors --params N --staging DIR --folder DIR --out FILE

Runs in a process of its own with all threads. The copies are tensor by tensor, as a model has them.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import mmap
import os
import time
from pathlib import Path

import torch
import xxhash

from bench.checkpoint_size import ADAM_TENSORS, model_spec
from surefoot.sdk.copying import copy_all
from surefoot_worker.recipe.model import build_model

PIECE_BYTES = 8 * 2**20
PAGE_BYTES = 4096
NUM_COPIES = 4


def tensors_of(num_parameters: int) -> list[torch.Tensor]:
    """Return warm tensors of the sizes that the state has."""
    model = build_model(model_spec(num_parameters), 0, torch.device("cpu"))
    return [torch.ones_like(p) for p in model.parameters() for _ in range(ADAM_TENSORS)]


def copy_seconds(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> float:
    """Return the seconds that the copies take once everything is warm: the best of several, torch's way and ours.

    A floor that the machine's noise has raised would flatter whoever is compared with it.
    """
    seconds = []
    for _ in range(NUM_COPIES):
        for copy in (copy_one_by_one, copy_all):
            started = time.perf_counter()
            copy(list(zip(targets, sources, strict=True)))
            seconds.append(time.perf_counter() - started)
    return min(seconds)


def copy_one_by_one(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy with torch's own threads, which meet after every tensor."""
    for target, source in pairs:
        target.copy_(source)


def views_of(memory: mmap.mmap, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors like these one after the other in the memory."""
    views, offset = [], 0
    for tensor in tensors:
        view = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        views.append(view.view(tensor.shape))
        offset += tensor.nbytes
    return views


def write_seconds(path: Path, memory: memoryview) -> float:
    """Return the seconds of an O_DIRECT write of it all and one fsync; no checksum."""
    started = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    for start in range(0, len(memory), PIECE_BYTES):
        os.write(fd, memory[start : start + PIECE_BYTES])
    os.fsync(fd)
    os.close(fd)
    return time.perf_counter() - started


def read_seconds(path: Path, piece: memoryview) -> float:
    """Return the seconds of an O_DIRECT read into warm memory; no checksum."""
    started = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        fcntl.fcntl(file.fileno(), fcntl.F_SETFL, os.O_RDONLY | os.O_DIRECT)
        while file.readinto(piece):
            pass
    return time.perf_counter() - started


def hash_seconds(memory: memoryview) -> float:
    """Return the seconds of the checksum alone."""
    started = time.perf_counter()
    digest = xxhash.xxh3_128()
    for start in range(0, len(memory), PIECE_BYTES):
        digest.update(memory[start : start + PIECE_BYTES])
    return time.perf_counter() - started


def measure(num_parameters: int, staging: Path, folder: Path) -> dict[str, float]:
    """Return the floors in seconds, and `bytes`."""
    tensors = tensors_of(num_parameters)
    num_bytes = sum(t.nbytes for t in tensors)
    folder.mkdir(parents=True, exist_ok=True)
    staged, written = staging / f"floor-{os.getpid()}", folder / "floor"
    try:
        with staged.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, -(-num_bytes // PAGE_BYTES) * PAGE_BYTES)
            memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        views = views_of(memory, tensors)
        return {
            "bytes": num_bytes,
            "copy into staging": copy_seconds(tensors, views),
            "copy out of staging": copy_seconds(views, tensors),
            "write and fsync": write_seconds(written, memoryview(memory)),
            "read": read_seconds(written, memoryview(mmap.mmap(-1, PIECE_BYTES))),
            "checksum": hash_seconds(memoryview(memory)),
        }
    finally:
        staged.unlink(missing_ok=True)
        written.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--staging", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.write_text(json.dumps(measure(options.params, options.staging, options.folder)))


if __name__ == "__main__":
    main()
