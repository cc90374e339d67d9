from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from helpers.stored import f32, store_checkpoint
from surefoot.checkpoint.catalog import read_manifest
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.store import LocalStore
from surefoot.errors import DamagedCheckpoint
from surefoot_writer.finite import find_nonfinite

ID = CheckpointId(1, 10)


def scan(job: Path, **options: object) -> str | None:
    store = LocalStore(job)
    return find_nonfinite(store, read_manifest(store, ID), ID, **options)


def floats(dtype: str, *values: float) -> bytes:
    return np.asarray(values, dtype=dtype).tobytes()


def bits(*values: int) -> bytes:
    return np.asarray(values, dtype="<u2").tobytes()


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("F64", floats("<f8", 1.0, np.finfo("f8").max, -np.finfo("f8").tiny, 0.0)),
        ("F32", floats("<f4", 1.0, np.finfo("f4").max, -0.0)),
        ("F16", floats("<f2", 1.0, 65504.0, -65504.0)),
        ("BF16", bits(0x3F80, 0x7F7F, 0xFF7F)),
        ("C64", floats("<c8", 1 + 2j)),
        ("F8_E4M3", bytes([0x7E, 0xFE, 0x00])),
        ("F8_E5M2", bytes([0x7B, 0xFB, 0x00])),
        # What would be NaN or Inf as a float is a number here.
        ("I32", bytes.fromhex("0000c07f0000807f")),
        ("I64", bytes.fromhex("000000000000f87f")),
        ("U8", b"\x7f\xff"),
        ("BOOL", b"\x01\x00"),
    ],
)
def test_the_largest_numbers_are_finite(tmp_path: Path, kind: str, data: bytes) -> None:
    store_checkpoint(tmp_path / "job", ID, {"x": (kind, data)})
    assert scan(tmp_path / "job") is None


@pytest.mark.parametrize(
    ("kind", "item"),
    [
        ("F64", floats("<f8", np.nan)),
        ("F64", floats("<f8", -np.inf)),
        ("F32", floats("<f4", np.nan)),
        ("F32", floats("<f4", np.inf)),
        ("F16", floats("<f2", np.nan)),
        ("F16", floats("<f2", -np.inf)),
        ("BF16", bits(0x7F80)),
        ("BF16", bits(0xFFC1)),
        ("C64", floats("<c8", complex(0, np.nan))),
        ("F8_E4M3", b"\xff"),
        ("F8_E5M2", b"\x7c"),
        ("F8_E5M2", b"\xfe"),
    ],
)
@pytest.mark.parametrize("place", [0, 1000, 2999])
def test_one_bad_item_anywhere_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, item: bytes, place: int
) -> None:
    monkeypatch.setattr("surefoot_writer.finite.PIECE_BYTES", 1024)
    data = bytearray(3000 * len(item))
    data[place * len(item) : (place + 1) * len(item)] = item
    good = f32(*range(100))
    store_checkpoint(tmp_path / "job", ID, {"good": good}, {"also": good, "bad": (kind, bytes(data)), "step": good})

    assert scan(tmp_path / "job") == "bad"


def test_a_checkpoint_without_tensors_on_some_rank_is_fine(tmp_path: Path) -> None:
    store_checkpoint(tmp_path / "job", ID, {"x": f32(1.0)}, {}, {"empty": ("F32", b"")})
    assert scan(tmp_path / "job") is None


def test_damage_is_found_while_it_reads(tmp_path: Path) -> None:
    folder = store_checkpoint(tmp_path / "job", ID, {"x": f32(*range(1000))}, {"y": f32(1.0, np.nan)})
    shard = folder / "rank-00000.safetensors"
    whole = shard.read_bytes()
    for damaged in (whole[:-1], whole + b"\0", whole[:-5] + b"\x01" + whole[-4:], b"", b"\xff" * 20, whole[:100]):
        shard.write_bytes(damaged)
        with pytest.raises(DamagedCheckpoint, match="rank-00000"):
            scan(tmp_path / "job")
    shard.unlink()
    with pytest.raises(DamagedCheckpoint, match="is missing"):
        scan(tmp_path / "job")


def test_a_header_of_many_tensors_is_read(tmp_path: Path) -> None:
    tensors = {f"a.long.name.of.a.tensor.{i:06}": ("U8", b"\1") for i in range(12_000)}
    store_checkpoint(tmp_path / "job", ID, tensors | {"z": f32(np.inf)})
    assert scan(tmp_path / "job") == "z"


def test_it_says_that_it_goes_on(tmp_path: Path) -> None:
    beats: list[None] = []
    store_checkpoint(tmp_path / "job", ID, {"x": ("U8", bytes(20 * 2**20))})
    scan(tmp_path / "job", on_piece=lambda: beats.append(None))
    assert len(beats) == 4  # the header, and 20 MiB in pieces of 8
