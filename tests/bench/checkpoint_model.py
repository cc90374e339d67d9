"""The model, optimizer and data of `bench.checkpoint`: the same for every contender."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.checkpoint_size import ADAM_TENSORS, model_spec
from surefoot.spec import RecipeSpec
from surefoot_worker.recipe.model import build_model, build_optimizer


@dataclass
class Training:
    """What is trained.

    Attributes:
        model: Plain, on the CPU, with the same weights on every rank.
        optimizer: AdamW over it.
        data: Samples of a few tokens: most of a step is then work on the weights, and a step stays short.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    data: Tokens

    @classmethod
    def build(cls, num_parameters: int, num_tokens: int) -> Training:
        spec = model_spec(num_parameters)
        model = build_model(spec, 0, torch.device("cpu"))
        return cls(model, build_optimizer(model, RecipeSpec()), Tokens(spec.vocab_size, num_tokens))

    @property
    def state_bytes(self) -> int:
        return ADAM_TENSORS * sum(p.nbytes for p in self.model.parameters())


class Tokens:
    """A data set of samples that look random and are a function of their index."""

    def __init__(self, vocab_size: int, num_tokens: int) -> None:
        self._vocab_size = vocab_size
        self._num_tokens = num_tokens

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> Tensor:
        positions = torch.arange(self._num_tokens) + self._num_tokens * index
        return torch.remainder(positions * 2654435761, self._vocab_size)


def world() -> tuple[int, int]:
    """Return rank and world size as torchrun gives them."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
