"""Which sample is trained on at which step, at any world size, from any step.

Everything is a pure function of (number of samples, global batch size, seed, step, skip windows, rank, world
size), so no state has to be saved to resume exactly. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from surefoot.errors import UsageError
from surefoot.sdk.data.permutation import MAX_DOMAIN_SIZE, Int64Array, epoch_keys, permute

_SAMPLES_PER_BLOCK = 1024
"""numpy needs 0.3 ms for a handful of samples and hardly more for these, so look ahead and keep them."""

_Block = tuple[tuple[int, int, int], Int64Array, Int64Array]
"""(block number, first slot, end slot), epochs and indices of shape [positions, slots]."""


class Window(Protocol):
    """A half-open range of batch positions that is left out of training (`attempts.SkipWindow` is one)."""

    @property
    def start(self) -> int:
        """First position left out."""

    @property
    def stop(self) -> int:
        """First position after it that is not left out."""


def position(step: int, skip_windows: Iterable[Window] = ()) -> int:
    """Return the batch position that step number `step` (from 0) trains on.

    It is the step-th position outside all windows, which may overlap, touch, be empty and be in any order.
    """
    result = step
    counted_until = 0
    for window in sorted(skip_windows, key=lambda w: w.start):
        start = max(window.start, counted_until)
        if start > result:
            break
        result += max(0, window.stop - start)
        counted_until = max(counted_until, window.stop)
    return result


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """The samples of one forward pass of one rank.

    `weight` makes DDP exact: with each micro-batch's mean loss multiplied by it, summed over a rank's
    micro-batches and averaged over ranks, the result is the mean over the global batch, also where parts are
    unequal.
    """

    position: int
    """Batch position in the data order (not the step, when data was skipped)."""
    micro_index: int
    """Number of this micro-batch among the rank's of this step, from 0."""
    num_micro_batches: int
    """How many the rank has in this step."""
    weight: float
    epochs: Int64Array
    """Shape [samples]: the epoch that each sample belongs to."""
    indices: Int64Array
    """Shape [samples]: their indices in the dataset."""

    @property
    def is_last(self) -> bool:
        """Whether the optimizer steps after this one."""
        return self.micro_index == self.num_micro_batches - 1

    def __len__(self) -> int:
        return len(self.indices)


class DataOrder:
    """The order of a dataset's samples.

    Args:
        num_samples: Of the dataset, N.
        global_batch_size: Samples per step over all ranks, B. May exceed N; batches straddle epochs.
        seed: Of the shuffle, 0 to 2**64-1.
        shuffle: False: index order in every epoch.

    Raises:
        UsageError: N or B out of range.
    """

    def __init__(self, num_samples: int, global_batch_size: int, seed: int, shuffle: bool = True) -> None:
        if not 1 <= num_samples <= MAX_DOMAIN_SIZE:
            raise UsageError("dataset", f"must hold at least one sample and at most 2**62, but holds {num_samples}")
        if not 0 <= seed < 2**64:
            raise UsageError("seed", f"must be 0 to 2**64-1 (got {seed})")
        if global_batch_size < 1:
            raise UsageError("global_batch_size", f"must be at least 1 (got {global_batch_size})")
        self.num_samples = num_samples
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self._block: _Block | None = None

    def step_samples(self, position: int) -> tuple[Int64Array, Int64Array]:
        """Return (epochs, dataset indices), each of shape [B], of the batch at a position."""
        return self._slots(position, 0, self.global_batch_size)

    def epoch_of(self, position: int) -> int:
        """Return the epoch that the first sample of the batch at a position belongs to."""
        return position * self.global_batch_size // self.num_samples

    def rank_micro_batches(
        self, position: int, rank: int, world_size: int, micro_batch_size: int | None = None
    ) -> list[MicroBatch]:
        """Return what one rank trains on in the batch at a position, in order.

        Rank r owns slots [r*B//W, (r+1)*B//W), cut into the fewest pieces that fit, as equal as can be. All
        ranks have the same number of pieces, unless parts are unequal and the pieces hold a single sample.

        Args:
            position: Of the batch, from `position()`.
            rank: 0 to world_size-1.
            world_size: Ranks that share the batch, at most B.
            micro_batch_size: Most samples in a piece; None: the whole part in one.

        Raises:
            UsageError: fewer samples in the global batch than ranks, or micro_batch_size below 1.
        """
        batch = self.global_batch_size
        if batch < world_size:
            raise UsageError("global_batch_size", f"must be at least the number of ranks, {world_size} (got {batch})")
        if micro_batch_size is not None and micro_batch_size < 1:
            raise UsageError("micro_batch_size", f"must be at least 1 (got {micro_batch_size})")
        start, stop = rank * batch // world_size, (rank + 1) * batch // world_size
        largest_part = -(-batch // world_size)
        num_pieces = min(stop - start, -(-largest_part // (micro_batch_size or largest_part)))
        bounds = [(stop - start) * piece // num_pieces for piece in range(num_pieces + 1)]
        epochs, indices = self._slots(position, start, stop)
        return [
            MicroBatch(
                position=position,
                micro_index=piece,
                num_micro_batches=num_pieces,
                weight=(end - begin) * world_size / batch,
                epochs=epochs[begin:end],
                indices=indices[begin:end],
            )
            for piece, (begin, end) in enumerate(pairwise(bounds))
        ]

    def _slots(self, position: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """Return (epochs, indices) of slots start..stop-1 of a batch; made for many positions at once."""
        num_positions = max(1, _SAMPLES_PER_BLOCK // (stop - start))
        number, row = divmod(position, num_positions)
        key = (number, start, stop)
        block = self._block
        if block is None or block[0] != key:
            block = (key, *self._compute(number * num_positions, num_positions, start, stop))
            self._block = block
        return block[1][row], block[2][row]

    def _compute(self, first: int, num_positions: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        # Python integers carry the product, which may pass 2**63 although the parts do not.
        first_epoch, offset = divmod(first * self.global_batch_size + start, self.num_samples)
        rows = np.arange(num_positions, dtype=np.int64)[:, None] * self.global_batch_size
        turns, places = np.divmod(offset + rows + np.arange(stop - start, dtype=np.int64), self.num_samples)
        epochs = turns + first_epoch
        if self.shuffle:
            flat = permute(places.ravel(), self.num_samples, epoch_keys(self.seed, epochs.ravel()))
            places = flat.reshape(places.shape)
        epochs.flags.writeable = places.flags.writeable = False
        return epochs, places
