"""Where the bytes of one part of a tensor lie in the whole tensor. Pure.

Both are row-major and without holes, as in safetensors. A part is then a sequence of equally long runs that are
contiguous in the whole tensor too: a single run when it is the whole, or when only its first dimension was split.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Bytes `start` to `stop` of the part, which lie at `at` in the whole."""

    start: int
    stop: int
    at: int


class Placement:
    """One part's place.

    Args:
        shape: Of the part.
        global_shape: Of the whole tensor.
        global_offset: Where the part begins in it, in items per dimension.
        item_bytes: Bytes of one item.
    """

    def __init__(
        self, shape: Sequence[int], global_shape: Sequence[int], global_offset: Sequence[int], item_bytes: int
    ) -> None:
        # All dimensions after this one are whole, so rows of this one lie next to each other.
        split = max((i for i, (ours, whole) in enumerate(zip(shape, global_shape, strict=True)) if ours != whole),
                    default=0)  # fmt: skip
        strides = [math.prod(global_shape[i + 1 :]) * item_bytes for i in range(len(global_shape))]
        self.run_bytes = math.prod(shape[split:]) * item_bytes
        self._lengths = tuple(shape[:split])
        self._strides = tuple(strides[:split])
        self._first = sum(offset * stride for offset, stride in zip(global_offset, strides, strict=True))

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield where bytes `start` to `stop` of the part belong, in order."""
        while start < stop:
            run, within = divmod(start, self.run_bytes)
            end = min(stop, start + self.run_bytes - within)
            yield Piece(start, end, self._run_at(run) + within)
            start = end

    def _run_at(self, run: int) -> int:
        at = self._first
        for length, stride in zip(reversed(self._lengths), reversed(self._strides), strict=True):
            run, index = divmod(run, length)
            at += index * stride
        return at


def find_gap(global_shape: Sequence[int], parts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str | None:
    """Return what is wrong with the parts of a tensor, None when they make it up exactly.

    Args:
        global_shape: Of the whole tensor.
        parts: (offset, shape) of each.
    """
    for offset, shape in parts:
        ranks = {len(offset), len(shape), len(global_shape)}
        if len(ranks) > 1 or any(o < 0 or o + s > g for o, s, g in zip(offset, shape, global_shape, strict=True)):
            return f"a part of shape {list(shape)} at {list(offset)} does not lie in shape {list(global_shape)}"
    filled = [(tuple(offset), tuple(shape)) for offset, shape in parts if math.prod(shape)]
    for i, (offset, shape) in enumerate(sorted(filled)):
        for other, other_shape in sorted(filled)[i + 1 :]:
            if offset and other[0] >= offset[0] + shape[0]:
                break  # sorted by the first dimension: nothing after it can overlap either
            if all(a < b + n and b < a + m for a, m, b, n in zip(offset, shape, other, other_shape, strict=True)):
                return f"two parts overlap, at {list(offset)} and at {list(other)}"
    num_items, there = math.prod(global_shape), sum(math.prod(shape) for _, shape in filled)
    return None if there == num_items else f"its parts have {there} of {num_items} items"
