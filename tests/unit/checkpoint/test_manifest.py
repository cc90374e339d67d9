from __future__ import annotations

import json
import math
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.checkpoint.manifest import (
    Manifest,
    ShardPart,
    build_manifest,
    checksum,
    decode_manifest,
    decode_part,
    encode_manifest,
    encode_part,
    part_file,
    shard_file,
)
from surefoot.errors import CheckpointError, DamagedCheckpoint


def part(rank: int = 0, world_size: int = 2, **changes) -> ShardPart:
    fields = {
        "job": "llm",
        "attempt": 3,
        "step": 120,
        "world_size": world_size,
        "rank": rank,
        "plan_digest": "ab" * 16,
        "file": shard_file(rank),
        "num_bytes": 1000 + rank,
        "xxh3_128": checksum(b"shard %d" % rank),
        "scalars": {"step": 120} if rank == 0 else None,
    }
    return ShardPart(**(fields | changes))


def built(*parts: ShardPart) -> Manifest:
    return build_manifest([(encode_part(p), p) for p in parts])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_scalars_survive_exactly_and_in_their_order(scalars):
    decoded = decode_part(encode_part(part(scalars=scalars)), "p").scalars
    assert decoded == scalars
    assert repr(decoded) == repr(scalars)  # order of keys, -0.0, 1 and 1.0 and True apart


def test_nan_and_infinity_survive():
    scalars = {"best": math.inf, "worst": -math.inf, "last": math.nan}
    decoded = decode_part(encode_part(part(scalars=scalars)), "p").scalars
    assert decoded["best"] == math.inf
    assert decoded["worst"] == -math.inf
    assert math.isnan(decoded["last"])


def test_a_manifest_lists_shards_and_part_files_in_rank_order():
    manifest = built(part(0), part(1))
    assert [entry.file for entry in manifest.files] == [
        "rank-00000.safetensors",
        "rank-00000.json",
        "rank-00001.safetensors",
        "rank-00001.json",
    ]
    data = encode_part(part(1))
    assert manifest.shard(1).num_bytes == 1001
    assert manifest.part(1) == manifest.files[3]
    assert (manifest.part(1).num_bytes, manifest.part(1).xxh3_128) == (len(data), checksum(data))
    assert manifest.num_bytes == 2001 + len(encode_part(part(0))) + len(data)
    assert manifest.checkpoint_id == (3, 120)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 12), st.randoms())
def test_two_writers_that_see_the_same_parts_make_the_same_bytes(world_size, shuffle):
    parts = [part(rank, world_size) for rank in range(world_size)]
    shuffled = list(parts)
    shuffle.shuffle(shuffled)
    assert encode_manifest(built(*parts)) == encode_manifest(built(*shuffled))


def test_other_parts_make_another_manifest():
    one = built(part(0), part(1))
    assert encode_manifest(one) != encode_manifest(built(part(0, scalars={"step": 121}), part(1)))
    assert encode_manifest(one) != encode_manifest(built(part(0), part(1, xxh3_128="0" * 32)))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "at least one"),
        ([part(1)], r"ranks \[1\]"),
        ([part(0)], "world size is 2"),
        ([part(0), part(0)], r"ranks \[0, 0\]"),
        ([part(0), part(1), part(2)], "world size is 2"),
        ([part(0), part(1, attempt=4)], "attempt is 3 on rank 0 and 4 on rank 1"),
        ([part(0), part(1, step=121)], "step is 120 on rank 0 and 121 on rank 1"),
        ([part(0), part(1, job="other")], "job"),
        ([part(0), part(1, world_size=3)], "world_size"),
        ([part(0), part(1, plan_digest="cd" * 16)], "plan_digest"),
        ([part(0), part(1, file="../../etc/passwd")], "calls its shard"),
        ([part(0, scalars=None), part(1)], "scalars"),
        ([part(0), part(1, scalars={})], "scalars"),
    ],
)
def test_parts_that_do_not_belong_together_make_no_manifest(parts, message):
    with pytest.raises(CheckpointError, match=message):
        built(*parts)


def test_a_manifest_is_read_back():
    manifest = built(part(0), part(1))
    assert decode_manifest(encode_manifest(manifest), "m") == manifest


@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80, 0xFF])
def test_c8_any_byte_changed_anywhere_in_a_manifest_is_noticed(mask):
    data = encode_manifest(built(part(0), part(1)))
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= mask
        with pytest.raises(DamagedCheckpoint, match=r"folder/manifest\.json"):
            decode_manifest(bytes(damaged), "folder/manifest.json")


def test_c1_a_manifest_cut_off_anywhere_is_noticed():
    data = encode_manifest(built(part(0, 1)))
    for length in range(len(data)):
        with pytest.raises(DamagedCheckpoint):
            decode_manifest(data[:length], "m")


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda fields: fields | {"files": fields["files"][:2]},
        lambda fields: fields | {"files": list(reversed(fields["files"]))},
        lambda fields: fields | {"world_size": 1},
        lambda fields: fields | {"world_size": 3},
        lambda fields: fields | {"step": 121},
    ],
)
def test_a_manifest_rewritten_as_valid_json_is_noticed(rewrite):
    fields = rewrite(json.loads(encode_manifest(built(part(0), part(1)))))
    with pytest.raises(DamagedCheckpoint):
        decode_manifest(json.dumps(fields, separators=(",", ":")).encode() + b"\n", "m")


def test_a_manifest_that_leaves_out_files_is_refused_even_with_a_right_checksum():
    manifest = built(part(0), part(1))
    short = manifest.model_copy(update={"files": manifest.files[:3], "checksum": ""})
    short = short.model_copy(update={"checksum": checksum(encode_manifest(short))})
    with pytest.raises(DamagedCheckpoint, match="does not list the files of 2 ranks"):
        decode_manifest(encode_manifest(short), "m")


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{}", b'{"rank": 0', b"\xff\xfe\x00"])
def test_what_is_not_a_part_is_damaged_and_named(data):
    with pytest.raises(DamagedCheckpoint) as caught:
        decode_part(data, part_file(4))
    assert caught.value.path == "rank-00004.json"


def test_random_bytes_are_never_a_manifest():
    source = random.Random(0)
    for length in range(200):
        with pytest.raises(DamagedCheckpoint):
            decode_manifest(source.randbytes(length), "m")


def test_a_newer_format_is_not_damage():
    """Quarantine is for damage: a checkpoint of a newer Surefoot must stay where it is."""
    with pytest.raises(CheckpointError, match="has format version 2; this Surefoot reads up to 1") as raised:
        decode_manifest(b'{"version":2,"something":"new"}\n', "x/manifest.json")
    assert not isinstance(raised.value, DamagedCheckpoint)


def test_nested_without_end_is_damage():
    with pytest.raises(DamagedCheckpoint, match="nested too deeply"):
        decode_manifest(b"[" * 200_000, "manifest.json")


def test_a_world_size_of_a_billion_costs_no_list_of_names():
    manifest = built(part(0), part(1)).model_copy(update={"world_size": 10**9, "checksum": ""})
    manifest = manifest.model_copy(update={"checksum": checksum(encode_manifest(manifest))})
    data = encode_manifest(manifest)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedCheckpoint, match="does not list the files of 1000000000 ranks"):
            decode_manifest(data, "m")
        with pytest.raises(CheckpointError, match="but the world size is 1000000000"):
            built(part(0, 10**9), part(1, 10**9))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
