"""Which rank stages which tensors, and where they lie in its shard.

With DDP every rank holds everything, so each stages only its share of the tensors; of a sharded tensor each rank
stages its own part, if no other has the same. All shares make one snapshot. The plan is made once per attempt, for
which the ranks tell each other what they hold; a snapshot is then a list of copies, and nobody talks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surefoot.checkpoint.layout import ShardLayout, TensorSpec, plan_digest, share_out
from surefoot.checkpoint.staging import StagingBuffer
from surefoot.sdk.collectives import ControlGroup
from surefoot.sdk.sharding import is_sharded, local_part, spec_of, tensor_over
from surefoot.sdk.state import TrainingState

Signature = list[tuple[str, torch.dtype, torch.Size]]


@dataclass
class ShardPlan:
    """What this rank stages.

    Attributes:
        signature: Name, dtype and shape of every captured tensor; another one needs another plan.
        layout: Of this rank's shard.
    """

    signature: Signature
    layout: ShardLayout
    _targets: dict[StagingBuffer, list[Tensor]] = field(default_factory=dict)

    def targets(self, buffer: StagingBuffer) -> list[Tensor]:
        """Return tensors over the buffer's memory to copy into, in the order of `layout.entries`."""
        if buffer not in self._targets:
            shard = buffer.shard
            self.layout.write_header(shard)
            self._targets[buffer] = [
                tensor_over(self.layout.tensor_view(shard, entry.name), entry) for entry in self.layout.entries
            ]
        return self._targets[buffer]

    def sources(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Return what of the captured tensors goes into the targets, in their order: memory of this rank."""
        return [local_part(tensors[entry.name]) for entry in self.layout.entries]


def signature(tensors: Mapping[str, Tensor]) -> Signature:
    """Return what a plan depends on."""
    return [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]


def make_plan(state: TrainingState, tensors: Mapping[str, Tensor], group: ControlGroup) -> ShardPlan:
    """Return what this rank stages of the captured tensors. Collective.

    Raises:
        UsageError: a tensor that a checkpoint cannot hold; names it.
    """
    held = list_held(tensors, state.is_replicated)
    layout = plan_shard(exchange(held, group), state.aliases, group.rank)
    return ShardPlan(signature(tensors), layout)


class Held(NamedTuple):
    """What a rank could stage.

    Attributes:
        shared: What it holds alike with others, or alone as its part of a sharded tensor.
        of_rank_0: What may differ from rank to rank without being parts of a whole: rank 0's is the one to keep.
    """

    shared: list[TensorSpec]
    of_rank_0: list[TensorSpec]


def list_held(tensors: Mapping[str, Tensor], is_replicated: Callable[[str], bool]) -> Held:
    """List the parts that this rank holds of the captured tensors.

    Args:
        tensors: By name.
        is_replicated: Whether a plain tensor is the same on every rank.

    Raises:
        UsageError: a tensor that a checkpoint cannot hold; names it.
    """
    held = Held([], [])
    for name, tensor in tensors.items():
        everywhere = is_sharded(tensor) or is_replicated(name)
        (held.shared if everywhere else held.of_rank_0).append(spec_of(name, tensor))
    return held


def exchange(held: Held, group: ControlGroup) -> list[list[TensorSpec]]:
    """Return for each rank the parts that it could stage. Collective.

    Digests go first: with DDP all ranks hold the same, and nothing more is sent.
    """
    document = [[_to_json(spec) for spec in specs] for specs in held]
    digest = hashlib.blake2b(json.dumps(document).encode(), digest_size=16).hexdigest()
    if len(set(group.gather_json(digest))) == 1:
        documents = [document] * group.world_size
    else:
        documents = group.gather_json(document)
    lists = [[_from_json(spec) for spec in shared] for shared, _ in documents]
    lists[0] += [_from_json(spec) for spec in documents[0][1]]
    return lists


def plan_shard(held: Sequence[Sequence[TensorSpec]], aliases: Mapping[str, str], rank: int) -> ShardLayout:
    """Return what one rank stages. Pure: the same plan on every rank that knows what all of them hold.

    Args:
        held: For each rank the parts that it could stage.
        aliases: Name of each tied tensor -> name under which it is stored.
        rank: Which rank's layout.
    """
    shares = share_out(held)
    digest = plan_digest(shares, len(held))
    return ShardLayout.build(shares[rank], rank=rank, world_size=len(held), plan_digest=digest, aliases=aliases)


def _to_json(spec: TensorSpec) -> list[Any]:
    return [spec.name, spec.dtype, spec.shape, spec.global_shape, spec.global_offset]


def _from_json(data: list[Any]) -> TensorSpec:
    name, dtype, *numbers = data
    shape, global_shape, global_offset = [None if n is None else tuple(n) for n in numbers]
    assert shape is not None
    return TensorSpec(name, dtype, shape, global_shape, global_offset)
