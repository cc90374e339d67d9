"""What a rank of a job of transformers' models runs, forked (see `forked`): weights from a folder, and training."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch imports it on first use: in every child anew
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.sharded_rank import KINDS, Net, join
from surefoot import sdk
from surefoot.errors import UsageError
from surefoot.sdk.collectives import ControlGroup
from surefoot.sdk.init_from import init_weights

LIMIT = timedelta(seconds=60)
PROBE = torch.arange(24).view(2, 12) % 37
"""Tokens that models are compared on."""


def tiny_config(**changes: Any) -> LlamaConfig:
    sizes = {
        "vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None,
    } | changes  # fmt: skip
    return LlamaConfig(**sizes)


@torch.no_grad()
def logits_of(model: torch.nn.Module) -> Tensor:
    model.eval()
    logits: Tensor = model(input_ids=PROBE, use_cache=False).logits
    model.train()
    return logits


class Sentences:
    """Sequences that can be learned: each token tells the next."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (torch.arange(13) + index) * 5 % 37
        return {"input_ids": tokens[:12], "labels": tokens[:12]}


def load_parts(folder: str, weights: str) -> int:
    """Load the weights into a model sharded in each way; writes the names that are not what the file holds."""
    join(folder)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    group = ControlGroup.join(torch.device("cpu"), LIMIT)
    stored = load_file(Path(weights, "model.safetensors"))
    wrong: dict[str, list[str]] = {}
    for kind, (_, shard) in KINDS.items():
        model = Net()
        if shard is not None:
            shard(model, mesh)
        init_weights(model, Path(weights), group)
        wrong[kind] = []
        for name, tensor in model.state_dict().items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            source = stored["embedding.weight" if name == "head.weight" else name]
            if not torch.equal(whole.detach(), source.to(whole.dtype)):
                wrong[kind].append(name)
    every = group.gather_json(wrong)
    if group.rank == 0:
        Path(folder, "wrong.json").write_text(json.dumps(every))
    return 0


def refuse_together(folder: str, weights: dict[str, str]) -> int:
    """Load from a folder that differs between ranks; writes what each rank was told."""
    join(folder)
    group = ControlGroup.join(torch.device("cpu"), LIMIT)
    try:
        init_weights(Net(), Path(weights[str(group.rank)]), group)
    except UsageError as error:
        Path(folder, f"told-{group.rank}").write_text(str(error))
    return 0


def train(folder: str, job: str, steps: int, init_from: str | None, learning_rate: float, dtype: str) -> int:
    """Train a tiny Llama; writes <folder>/<job>-<attempt>.pt with the logits at start and end, and losses."""
    join(folder)
    torch.manual_seed(3)
    model = LlamaForCausalLM(tiny_config()).to(getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    with sdk.attach(
        model,
        optimizer,
        dataset=Sentences(),
        global_batch_size=16,
        total_steps=steps,
        job=job,
        storage=Path(folder, "checkpoints"),
        run_dir=Path(folder, "run"),
        checkpoint={"save_every_seconds": None, "save_every_steps": None},
        init_from=init_from,
    ) as session:
        start, losses = logits_of(model), []
        for batch in session:
            loss = session.model(**batch).loss
            losses.append(loss.item())
            session.step(loss)
    if session.rank == 0:
        torch.save({"start": start, "end": logits_of(model), "losses": losses}, f"{folder}/{job}-{session.attempt}.pt")
    return 0
