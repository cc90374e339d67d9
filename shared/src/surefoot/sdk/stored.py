"""The tensors of one checkpoint as its shards hold them, and how they get into memory of this rank.

What is stored as parts may be wanted whole or in other parts (see `surefoot.checkpoint.regions`). Everything wanted is
collected first and then filled in one pass, shard by shard, so that no more than one shard is in memory beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from surefoot.checkpoint.layout import ShardLayout, TensorEntry
from surefoot.checkpoint.regions import Box, StoredTensor, merge_layouts
from surefoot.sdk.copying import copy_all
from surefoot.sdk.sharding import DTYPES, is_sharded, local_box, local_part, tensor_over


class StoredTensors:
    """What a checkpoint holds.

    Args:
        layouts: Of all its shards, in rank order.
        open_shard: Gives the bytes of a rank's shard from its first one on; asked once per shard and pass.

    Raises:
        CheckpointError: the shards do not make one checkpoint.
    """

    def __init__(
        self, layouts: Sequence[ShardLayout], open_shard: Callable[[int], AbstractContextManager[memoryview]]
    ) -> None:
        self.tensors: Mapping[str, StoredTensor] = merge_layouts(layouts)
        """Every tensor by name, tied names included."""
        self._layouts = layouts
        self._open_shard = open_shard

    def fill(self, targets: Sequence[Target]) -> None:
        """Copy what is wanted to where it is wanted, in one pass over the shards that hold some of it.

        Raises:
            OSError, CheckpointError: a shard cannot be read; some targets are filled then and some are not.
        """
        copies: dict[int, list[_Copy]] = {}
        for target in targets:
            for part, common in self.tensors[target.name].pieces(target.box):
                copy = _Copy(part.entry, common.within(part.box), target.memory, common.within(target.box))
                copies.setdefault(part.rank, []).append(copy)
        for rank in sorted(copies):
            with self._open_shard(rank) as shard:
                layout = self._layouts[rank]
                copy_all(
                    (memory[place], tensor_over(layout.tensor_view(shard, entry.name), entry)[source])
                    for entry, source, memory, place in copies[rank]
                )


class Target(NamedTuple):
    """Memory of this rank that wants a region of a stored tensor."""

    name: str
    memory: Tensor
    box: Box


class _Copy(NamedTuple):
    entry: TensorEntry
    source: tuple[slice, ...]
    memory: Tensor
    place: tuple[slice, ...]


class Wanted:
    """Collects what of a checkpoint goes where; nothing is read before `fill`.

    Args:
        stored: The checkpoint.
    """

    def __init__(self, stored: StoredTensors) -> None:
        self._stored = stored
        self._targets: list[Target] = []

    def into(self, name: str, tensor: Tensor) -> Tensor:
        """Want a stored tensor in existing memory of the same shape: all of it, or this rank's part; return that."""
        self._targets.append(Target(name, local_part(tensor).detach(), local_box(name, tensor)))
        return tensor

    def like(self, name: str, template: Tensor | None) -> Tensor:
        """Want a stored tensor in new memory, on the device and sharded as the template; in host memory without one."""
        tensor = self._stored.tensors[name]
        dtype = DTYPES[tensor.dtype]
        if template is not None and template.shape == tensor.shape:
            return self.into(name, torch.empty_like(template, dtype=dtype, requires_grad=False))
        device = "cpu" if template is None or is_sharded(template) else template.device
        return self.into(name, torch.empty(tensor.shape, dtype=dtype, device=device))

    def all_like(self, templates: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a mapping that wants, as by `like`, whatever name it is asked for."""
        return _OnDemand(self, templates)

    @torch.no_grad()
    def fill(self) -> None:
        """Read everything that is wanted.

        Raises:
            OSError, CheckpointError: a shard cannot be read; some of it is filled then and some is not.
        """
        self._stored.fill(self._targets)


class _OnDemand(Mapping[str, Tensor]):
    def __init__(self, wanted: Wanted, templates: Mapping[str, Tensor]) -> None:
        self._wanted = wanted
        self._templates = templates

    def __getitem__(self, name: str) -> Tensor:
        return self._wanted.like(name, self._templates.get(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._templates)

    def __len__(self) -> int:
        return len(self._templates)
