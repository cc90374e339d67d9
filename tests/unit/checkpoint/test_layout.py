from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize, safe_open
from safetensors.numpy import load_file

from surefoot.checkpoint.layout import (
    ALIGNMENT_BYTES,
    DTYPE_BYTES,
    ShardLayout,
    TensorSpec,
    plan_digest,
    share_out,
)

DIGEST = bytes(range(16))

SPECS = [
    TensorSpec("weight", "F32", (3, 5)),
    TensorSpec("half", "BF16", (7,)),
    TensorSpec("mask", "BOOL", (5,)),
    TensorSpec("steps", "I64", ()),
    TensorSpec("none", "F32", (0, 4)),
    TensorSpec("bytes", "U8", (3,)),
    TensorSpec("part", "F32", (2, 4), (8, 4), (6, 0)),
]


def build(specs=SPECS, aliases=None, world_size=2) -> ShardLayout:
    return ShardLayout.build(specs, rank=1, world_size=world_size, plan_digest=DIGEST, aliases=aliases)


def filled(layout: ShardLayout) -> bytearray:
    shard = bytearray(layout.shard_bytes)
    layout.write_header(memoryview(shard))
    for i, entry in enumerate(layout.entries):
        view = layout.tensor_view(memoryview(shard), entry.name)
        limit = 2 if entry.dtype == "BOOL" else 251
        view[:] = bytes((i + j) % limit for j in range(len(view)))
    return shard


def load(shard) -> dict[str, dict]:
    """Read with the reference implementation, which knows dtypes that numpy lacks (BF16)."""
    return dict(deserialize(bytes(shard)))


def test_a_shard_is_a_valid_safetensors_file(tmp_path):
    layout = build(aliases={"tied": "weight"})
    path = tmp_path / "shard.safetensors"
    shard = filled(layout)
    path.write_bytes(shard)
    read = load(shard)
    assert set(read) == {spec.name for spec in SPECS}
    for spec in SPECS:
        assert (read[spec.name]["dtype"], tuple(read[spec.name]["shape"])) == (spec.dtype, spec.shape)
        assert read[spec.name]["data"] == layout.tensor_view(memoryview(shard), spec.name)
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
    assert json.loads(metadata["surefoot"])["aliases"] == {"tied": "weight"}


def test_numpy_loads_a_shard(tmp_path):
    specs = [spec for spec in SPECS if spec.dtype != "BF16"]
    layout = build(specs)
    shard = filled(layout)
    (tmp_path / "shard.safetensors").write_bytes(shard)
    arrays = load_file(tmp_path / "shard.safetensors")
    for spec in specs:
        assert arrays[spec.name].shape == spec.shape
        assert arrays[spec.name].tobytes() == bytes(layout.tensor_view(memoryview(shard), spec.name))
    assert (arrays["steps"].dtype, arrays["mask"].dtype) == (np.int64, np.bool_)


def test_a_shard_without_tensors_is_valid_too():
    layout = build([])
    assert layout.data_bytes == 0
    assert load(bytes(filled(layout))) == {}
    assert ShardLayout.parse(layout.header) == layout


def test_data_starts_on_a_page_and_tensors_are_naturally_aligned():
    layout = build()
    assert layout.header_bytes % ALIGNMENT_BYTES == 0
    assert layout.shard_bytes == layout.header_bytes + sum(spec.num_bytes for spec in SPECS)
    for entry in layout.entries:
        assert entry.offset % DTYPE_BYTES[entry.dtype] == 0
    assert build(list(reversed(SPECS))).header == layout.header


def test_parse_gives_back_what_build_made():
    layout = build(aliases={"tied": "weight"})
    assert ShardLayout.parse(memoryview(filled(layout))) == layout
    assert layout.by_name["part"].global_offset == (6, 0)


def test_an_alias_is_a_view_of_the_stored_tensor():
    layout = build(aliases={"tied": "weight"})
    shard = memoryview(bytearray(layout.shard_bytes))
    layout.tensor_view(shard, "tied")[:4] = b"abcd"
    assert bytes(layout.tensor_view(shard, "weight")[:4]) == b"abcd"
    with pytest.raises(KeyError):
        layout.tensor_view(shard, "unknown")


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\xff" * 16,
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{}",
        (9).to_bytes(8, "little") + b"not json ",
    ],
)
def test_parse_refuses_what_is_not_a_shard(damage):
    with pytest.raises(ValueError):  # noqa: PT011
        ShardLayout.parse(damage)


def test_parse_refuses_holes():
    header = build().header.replace(b'"data_offsets":[0,8]', b'"data_offsets":[8,16]')
    with pytest.raises(ValueError, match="starts at"):
        ShardLayout.parse(header)


@pytest.mark.parametrize(
    ("specs", "aliases", "message"),
    [
        ([SPECS[0], SPECS[0]], None, "weight"),
        ([SPECS[0]], {"weight": "weight"}, "weight"),
    ],
)
def test_a_name_stands_for_one_tensor(specs, aliases, message):
    with pytest.raises(ValueError, match=message):
        build(specs, aliases)


def test_bad_specs_are_refused():
    with pytest.raises(ValueError, match="F31"):
        TensorSpec("a", "F31", ())
    with pytest.raises(ValueError, match="together"):
        TensorSpec("a", "F32", (1,), (2,), None)
    with pytest.raises(ValueError, match="__metadata__"):
        TensorSpec("__metadata__", "F32", ())


_specs = st.lists(
    st.builds(
        TensorSpec,
        name=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8),
        dtype=st.sampled_from(list(DTYPE_BYTES)),
        shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    max_size=12,
    unique_by=lambda spec: spec.name,
)


@settings(deadline=None, max_examples=60)
@given(_specs, st.integers(1, 5))
def test_any_tensors_make_a_loadable_shard_and_are_shared_out_once(specs, world_size):
    shares = share_out([specs] * world_size)
    assert shares == share_out([list(reversed(specs))] * world_size)
    assert sorted(s.name for share in shares for s in share) == sorted(s.name for s in specs)
    for share in shares:
        layout = build(share, world_size=world_size)
        shard = filled(layout)
        assert ShardLayout.parse(bytes(shard)) == layout
        shapes = {name: tuple(tensor["shape"]) for name, tensor in load(shard).items()}
        assert shapes == {s.name: s.shape for s in share}


def test_share_out_balances_bytes():
    specs = [TensorSpec(f"layer{i}", "F32", (100 + i,)) for i in range(20)]
    loads = [sum(s.num_bytes for s in share) for share in share_out([specs] * 4)]
    assert max(loads) - min(loads) <= max(s.num_bytes for s in specs)
    assert sum(loads) == sum(4 * math.prod(s.shape) for s in specs)


def test_a_part_that_several_ranks_hold_is_stored_once_by_one_of_them():
    """HSDP: two groups of two ranks hold the same two halves; a third part is one rank's own."""
    halves = [TensorSpec("w", "F32", (3, 4), (6, 4), (3 * i, 0)) for i in range(2)]
    own = TensorSpec("own", "F32", (100,))
    shares = share_out([[halves[0], own], [halves[1]], [halves[0]], [halves[1]]])
    assert sorted(s.global_offset for share in shares for s in share if s.name == "w") == [(0, 0), (3, 0)]
    assert shares[0] == [own], "it has enough to do"
    assert shares[2] == [halves[0]]


def test_empty_chunks_are_stored_by_nobody_but_empty_tensors_are():
    empty = TensorSpec("w", "F32", (0, 4), (2, 4), (2, 0))
    rows = [TensorSpec("w", "F32", (1, 4), (2, 4), (i, 0)) for i in range(2)]
    nothing = TensorSpec("nothing", "F32", (0, 4))
    assert share_out([[rows[0], nothing], [rows[1], nothing], [empty, nothing]]) == [
        [rows[0], nothing],
        [rows[1]],
        [],
    ]


def test_counts_of_steps_stay_together():
    """Scattered, they would make every rank of a sharded job read every shard at a restore."""
    steps = [TensorSpec(f"step{i}", "F32", ()) for i in range(20)]
    shares = share_out([[*steps, TensorSpec("w", "F32", (4, 4), (12, 4), (4 * r, 0))] for r in range(3)])
    assert [len(share) for share in shares] == [21, 1, 1]


def test_plan_digest_depends_on_the_plan_only():
    shares = share_out([SPECS] * 2)
    digest = plan_digest(shares, 2)
    assert len(digest) == 16
    assert digest == plan_digest([list(reversed(share)) for share in shares], 2)
    assert digest != plan_digest(list(reversed(shares)), 2)
    assert digest != plan_digest([*shares, []], 3)
