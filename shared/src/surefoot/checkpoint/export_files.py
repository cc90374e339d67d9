"""The files of an exported folder: made under a temporary name, synced, and renamed when all of them are whole."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from surefoot.checkpoint.hugging_face import INDEX_FILE, WEIGHTS_FILE
from surefoot.checkpoint.safetensors_file import TensorPlace, build_header
from surefoot.checkpoint.store import TEMP_PREFIX, sync_folder, temp_name
from surefoot.errors import UsageError
from surefoot.faultpoints import reach

Described = Mapping[str, tuple[str, tuple[int, ...]]]
"""(dtype, shape) of tensors by name."""


class Target(NamedTuple):
    """Where a tensor begins: in an open file, so many bytes from its start."""

    fd: int
    start: int

    def write(self, at: int, data: memoryview) -> None:
        """Write bytes at a place of the tensor, all of them.

        Raises:
            OSError: the disk fails or is full.
        """
        write_at(self.fd, self.start + at, data)


def write_at(fd: int, offset: int, data: memoryview) -> None:
    """Write all of the data at an offset of a file."""
    while data:
        num_bytes = os.pwrite(fd, data, offset)
        data, offset = data[num_bytes:], offset + num_bytes


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Give a folder to fill; it becomes `target` when the block ends well, and is gone otherwise.

    What killed processes left of earlier tries for the same target is removed.

    Raises:
        UsageError: `target` is there and is not an empty folder.
        OSError: the disk fails or is full.
    """
    check_free(target)
    target = target.resolve()  # of `.` or a link to an empty folder the name would not do
    target.parent.mkdir(parents=True, exist_ok=True)
    for path in target.parent.glob(f"{TEMP_PREFIX}*-{target.name}"):
        _remove_if_abandoned(path)
    folder = target.with_name(temp_name(target.name))
    folder.mkdir()
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # without locks on this file system nothing there is found abandoned either
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield folder
        os.fsync(fd)
        reach("export.written")
        check_free(target)
        try:
            folder.rename(target)
        except OSError:
            check_free(target)  # somebody else was quicker
            raise
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(fd)


def check_free(target: Path) -> None:
    """Refuse a target that would be overwritten.

    Raises:
        UsageError: there is something.
    """
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError("TARGET", f"{target} exists; allowed: a folder that does not exist yet, or an empty one")


def share_out(described: Described, max_file_bytes: int) -> dict[str, dict[str, TensorPlace]]:
    """Return the weight files by name, each with the places of its tensors. Pure.

    Args:
        described: All tensors.
        max_file_bytes: Most bytes of tensors in one file; a larger tensor has a file of its own.
    """
    groups: list[dict[str, tuple[str, tuple[int, ...]]]] = []
    room = 0
    for name in sorted(described, key=_natural):
        num_bytes = build_header({name: described[name]})[1][name].num_bytes
        if not groups or num_bytes > room:
            groups.append({})
            room = max_file_bytes
        groups[-1][name] = described[name]
        room -= num_bytes
    names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    names = [WEIGHTS_FILE] if len(groups) == 1 else names
    return {name: build_header(group)[1] for name, group in zip(names, groups, strict=True)}


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort layers.10 after layers.9, so that a file holds neighbouring layers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


@contextmanager
def weight_files(folder: Path, files: Mapping[str, Mapping[str, TensorPlace]]) -> Iterator[dict[str, Target]]:
    """Make the files of `share_out` and give the target of each tensor; they are synced when the block ends well."""
    targets: dict[str, Target] = {}
    with ExitStack() as stack:
        fds = []
        for file, places in files.items():
            header, _ = build_header({name: (place.dtype, place.shape) for name, place in places.items()})
            fd = os.open(folder / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            stack.callback(os.close, fd)
            fds.append(fd)
            write_at(fd, 0, memoryview(header))
            os.ftruncate(fd, len(header) + sum(place.num_bytes for place in places.values()))
            targets |= {name: Target(fd, place.start) for name, place in places.items()}
        yield targets
        for fd in fds:
            os.fsync(fd)


def write_index(folder: Path, files: Mapping[str, Mapping[str, TensorPlace]]) -> None:
    """Write which tensor is in which file; nothing where there is only one file."""
    if len(files) > 1:
        weight_map = {name: file for file, places in files.items() for name in places}
        total = sum(place.num_bytes for places in files.values() for place in places.values())
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file for people too, synced."""
    write_file(path, json.dumps(content, indent=2).encode() + b"\n")


def write_file(path: Path, content: bytes) -> None:
    """Write a small file, synced."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _remove_if_abandoned(path: Path) -> None:
    """Remove a folder that no living process fills: its maker holds flock on it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        return
    finally:
        os.close(fd)
