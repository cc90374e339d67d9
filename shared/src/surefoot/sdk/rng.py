"""Random state that is a pure function of where training is, so that none has to be stored.

The mixing function is splitmix64's finalizer (Steele, Lea, Flood: Fast splittable pseudorandom number
generators, OOPSLA 2014).
"""

from __future__ import annotations

import random

import numpy as np
import torch

_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def derive_seed(*parts: int) -> int:
    """Return a seed in 0..2**63-1 that depends on every part and on their order."""
    state = 0
    for part in parts:
        state = _mix(state ^ (part & _MASK))
    return state >> 1


def reseed(seed: int, step: int, rank: int, micro_index: int) -> None:
    """Set the RNGs of python, numpy and torch (CPU and CUDA) for one forward and backward pass.

    Defined for every rank of every world size: a rank that did not exist before has a state too.
    """
    value = derive_seed(seed, step, rank, micro_index)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    # torch.manual_seed would do both, after 1 ms of asking every backend that could be there.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)
