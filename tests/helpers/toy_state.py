"""A state that tells where it came from: every tensor is an exact function of the (attempt, step) pairs trained so far.

All values are small integers in float32, so numpy here and torch in `toy_job` come to the same bits in any order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

SHAPES = {"large": (280_001,), "small": (16, 33), "scalar": (1,)}
"""The parameters; the first is long enough for O_DIRECT."""

Trail = tuple[tuple[int, int], ...]
"""(attempt, step) of each step that led to a state, from the first on."""

_State = dict[str, NDArray[np.float32]]


def gradient(attempt: int, step: int, name: str) -> NDArray[np.float32]:
    """Return the gradient of a parameter in a step: different in every attempt."""
    source = np.random.default_rng([attempt, step, list(SHAPES).index(name)])
    return source.integers(-8, 9, SHAPES[name]).astype(np.float32)


def digest(array: NDArray[np.float32]) -> str:
    """Return what stands for all bits of a tensor."""
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()


def expected_digests(trail: Sequence[Sequence[int]]) -> dict[str, str]:
    """Return the digest of every parameter and momentum after a trail: SGD with learning rate 1 and momentum 1."""
    return {name: digest(value) for name, value in _after(tuple((a, s) for a, s in trail)).items()}


@lru_cache(maxsize=256)
def _after(trail: Trail) -> _State:
    if not trail:
        return {f"{kind}.{name}": np.zeros(shape, np.float32) for name, shape in SHAPES.items() for kind in ("p", "m")}
    state, (attempt, step) = dict(_after(trail[:-1])), trail[-1]
    for name in SHAPES:
        state[f"m.{name}"] = state[f"m.{name}"] + gradient(attempt, step, name)
        state[f"p.{name}"] = state[f"p.{name}"] - state[f"m.{name}"]
    return state
