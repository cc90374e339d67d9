from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.checkpoint.layout import ShardLayout, TensorSpec, share_out
from surefoot.checkpoint.regions import Box, merge_layouts
from surefoot.errors import CheckpointError


def layouts(shares, aliases=None):
    return [
        ShardLayout.build(share, rank=rank, world_size=len(shares), plan_digest=bytes(16), aliases=aliases)
        for rank, share in enumerate(shares)
    ]


def part(offset, shape, whole=(6, 4), name="w"):
    return TensorSpec(name, "F32", tuple(shape), tuple(whole), tuple(offset))


@st.composite
def grids(draw):
    """A shape, and the boxes of a grid of cuts through it, uneven and partly empty."""
    shape = draw(st.lists(st.integers(0, 6), max_size=3).map(tuple))
    cuts = [[0, *sorted(draw(st.lists(st.integers(0, n), max_size=3))), n] for n in shape]
    spans = [list(itertools.pairwise(points)) for points in cuts]
    boxes = [
        Box(tuple(start for start, _ in cell), tuple(stop - start for start, stop in cell))
        for cell in itertools.product(*spans)
    ]
    return shape, boxes


@settings(deadline=None, max_examples=100)
@given(grids(), st.data())
def test_any_region_is_put_together_from_any_grid_of_parts(grid, data):
    """Each rank has one cell of a grid; whoever wants another region gets every item of it, from its place."""
    shape, boxes = grid
    whole = np.arange(math.prod(shape)).reshape(shape)
    held = [[TensorSpec("w", "I64", box.shape, shape, box.offset)] for box in boxes]
    tensor = merge_layouts(layouts(share_out(held)))["w"] if math.prod(shape) else None
    starts = [data.draw(st.integers(0, n)) for n in shape]
    wanted = Box(tuple(starts), tuple(data.draw(st.integers(0, n - s)) for s, n in zip(starts, shape, strict=True)))
    result = np.full(wanted.shape, -1)
    for stored, common in tensor.pieces(wanted) if tensor is not None else []:
        memory = whole[stored.box.within(Box.whole(shape))]
        result[common.within(wanted)] = memory[common.within(stored.box)]
    assert np.array_equal(result, whole[wanted.within(Box.whole(shape))])


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([part((0, 0), (3, 4)), part((3, 0), (2, 4))], "w is not whole: its parts have 20 of 24 items"),
        ([part((0, 0), (3, 4)), part((2, 0), (3, 4))], "w is not whole: two parts overlap"),
        ([part((0, 0), (3, 4)), part((4, 0), (3, 4))], "w is not whole: a part of shape .* does not lie in"),
        ([part((0, 0), (3, 4)), part((3, 0), (3, 4), whole=(7, 4))], "parts of w do not fit together"),
    ],
)
def test_a_tensor_with_a_hole_is_no_tensor(parts, problem):
    with pytest.raises(CheckpointError, match=problem):
        merge_layouts(layouts([[p] for p in parts]))


def test_tied_names_lead_to_the_shard_that_holds_the_data():
    found = merge_layouts(layouts([[TensorSpec("a", "F32", (2,))], []], {"b": "a"}))
    assert found["b"] == found["a"]
    assert [stored.rank for stored in found["b"].parts] == [0]
    with pytest.raises(CheckpointError, match="tied to are in no shard: c"):
        merge_layouts(layouts([[TensorSpec("a", "F32", (2,))]], {"b": "c"}))
