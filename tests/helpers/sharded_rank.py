"""What a rank of a sharded job runs, forked (see `forked`): states that move between ways of sharding, and training."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch imports it on first use: in every child anew
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from helpers.shards import open_shards, write_shard
from surefoot import sdk
from surefoot.checkpoint.layout import ShardLayout
from surefoot.errors import UsageError
from surefoot.sdk.collectives import ControlGroup
from surefoot.sdk.replication import replicate
from surefoot.sdk.shard_plan import exchange, list_held
from surefoot.sdk.sharding import local_part
from surefoot.sdk.state import TrainingState

VOCABULARY, WIDTH, HIDDEN = 11, 6, 7
"""Primes and small numbers: no way of sharding divides them evenly, and some ranks get nothing."""


class Net(nn.Module):
    """Tied embeddings, a buffer, a scalar and a single-row parameter."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.gain = nn.Parameter(torch.ones(1, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) * self.gain
        return self.head(hidden + self.down(torch.tanh(self.up(hidden))))


class Shadow:
    """An average of the weights, sharded as they are."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.values[name].lerp_(parameter, 0.25)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


def _fsdp(model: Net, mesh: DeviceMesh) -> None:
    fully_shard([model.up, model.down], mesh=mesh)
    fully_shard(model, mesh=mesh)


def _tensor_parallel(model: Net, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _mixed(model: Net, mesh: DeviceMesh) -> None:
    _tensor_parallel(model, mesh["inner"])
    _fsdp(model, mesh["outer"])


def _by_columns(model: Net, mesh: DeviceMesh) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if module is not model.head and parameter.dim() == 2:
                sharded = distribute_tensor(parameter.detach(), mesh, [Shard(1), Shard(0)])
                module.register_parameter(name, nn.Parameter(sharded))
    model.head.weight = model.embedding.weight


KINDS: dict[str, tuple[int, Callable[[Net, DeviceMesh], None] | None]] = {
    "plain-1": (1, None),
    "ddp-2": (2, None),
    "ddp-4": (4, None),
    "fsdp-2": (2, lambda model, mesh: _fsdp(model, mesh["inner"])),
    "fsdp-4": (4, lambda model, mesh: _fsdp(model, mesh["outer", "inner"]._flatten("all"))),
    "hsdp-4": (4, _fsdp),
    "tp-2": (2, lambda model, mesh: _tensor_parallel(model, mesh["inner"])),
    "tp+fsdp-4": (4, _mixed),
    "columns-4": (4, _by_columns),
}
"""Name -> number of ranks, and how a model becomes sharded over a 2 x 2 mesh (or its inner pair of ranks)."""


def join(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def _value(name: str, tensor: Tensor) -> Tensor:
    """Return values that depend on the name alone."""
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest()))
    return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)


@torch.no_grad()
def _set(tensor: Tensor, value: Tensor) -> None:
    if isinstance(tensor, DTensor):
        value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.copy_(value)


class Setup:
    """One way of sharding on this rank: model, optimizer after a step, average; values depend on names alone."""

    def __init__(self, kind: str, mesh: DeviceMesh) -> None:
        self.num_ranks, shard = KINDS[kind]
        torch.manual_seed(1)
        self.model = Net()
        if shard is not None:
            shard(self.model, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.shadow = Shadow(self.model)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.state = TrainingState(self.model, self.optimizer, {"shadow": self.shadow})
        self.kinds = self._kinds()
        for name, tensor in self.capture().items():
            _set(tensor, _value(name, tensor))
        self.expected = {name: local_part(tensor).clone() for name, tensor in self.capture().items()}

    def capture(self) -> dict[str, Tensor]:
        return self.state.capture()[0]

    @torch.no_grad()
    def forget(self, *, optimizer: bool) -> None:
        """Spoil every value, or have the optimizer begin anew."""
        for tensor in self.capture().values():
            local_part(tensor).zero_()
        if optimizer:
            self.optimizer.state.clear()

    def find_wrong(self) -> list[str]:
        """Return the names of tensors that do not hold what belongs to them, or are not what the optimizer makes."""
        now, kinds = self.capture(), self._kinds()
        return [
            name
            for name, values in self.expected.items()
            if kinds.get(name) != self.kinds[name] or not torch.equal(local_part(now[name]), values)
        ]

    def _kinds(self) -> dict[str, list[str]]:
        return {
            name: [type(t).__name__, str(t.placements) if isinstance(t, DTensor) else "", str(t.dtype)]
            for name, t in self.capture().items()
        }


def round_trips(folder: str) -> int:
    """Save in every way of sharding and load into every other one; writes what went wrong, and what was stored."""
    join(folder)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    everybody = ControlGroup.join(torch.device("cpu"), timedelta(seconds=60))
    setups = {kind: Setup(kind, mesh) for kind in KINDS}
    wrong: dict[str, list[str]] = {}
    stored: dict[str, list[list[Any]]] = {}
    for source, saved in setups.items():
        assert saved.find_wrong() == []  # every load so far was right
        tensors, scalars = saved.state.capture()
        # Of 1 or 2 ranks there are several jobs side by side, which all save the same; the first one is looked at.
        held = _exchange_among(saved.num_ranks, everybody, list_held(tensors, saved.state.is_replicated))
        shard = write_shard(tensors, held, saved.state.aliases, everybody.rank % saved.num_ranks)
        encoded = everybody.gather_json(base64.b64encode(shard).decode())
        shards = [bytearray(base64.b64decode(text)) for text in encoded[: saved.num_ranks]]
        checkpoint, document = open_shards(shards), json.loads(json.dumps(scalars))
        stored[source] = [
            [rank, entry.name, entry.num_bytes]
            for rank, shard in enumerate(shards)
            for entry in ShardLayout.parse(shard).entries
        ]
        for target, loaded in setups.items():
            for fresh in (True, False):
                loaded.forget(optimizer=fresh)
                loaded.state.restore(checkpoint, document)
                wrong[f"{source} to {target}, optimizer {'new' if fresh else 'in place'}"] = loaded.find_wrong()
    every = everybody.gather_json(wrong)
    refused = {kind: _refusal(setup.model) for kind, setup in setups.items() if KINDS[kind][1] is not None}
    if everybody.rank == 0:
        wrong = {pair: sorted({name for one in every for name in one[pair]}) for pair in wrong}
        Path(folder, "results.json").write_text(json.dumps({"wrong": wrong, "stored": stored, "refused": refused}))
    return 0


def _refusal(model: nn.Module) -> str:
    """Return why a session of all ranks does not take the model; empty: it does."""
    try:
        return "" if replicate(model, dist.get_world_size(), init_sync=False) is model else "was wrapped"
    except UsageError as error:
        return str(error)


def _exchange_among(num_ranks: int, everybody: ControlGroup, held: Any) -> Any:
    """Exchange as a job of so many ranks would: the first ones of all."""

    class First:
        world_size = num_ranks

        @staticmethod
        def gather_json(value: Any) -> list[Any]:
            return everybody.gather_json(value)[:num_ranks]

    return exchange(held, First())  # type: ignore[arg-type]


class Sentences:
    """Token sequences that depend on their index."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "tokens": (torch.arange(5) * (index + 1) + index // 7) % VOCABULARY}


def train(folder: str, kind: str, steps: int, micro_batch_size: int | None, pause_after: int | None) -> int:
    """Train one job under the sdk, sharded as `kind` says; goes on from whatever is there.

    Writes <folder>/<attempt>-<rank>.json: digests of the whole state at the start and at the end, ids by step.

    Args:
        folder: Of the job; rank 0 of the process group meets the others in `rendezvous` there.
        kind: Of `KINDS`, with its number of ranks.
        steps: Where the job ends.
        micro_batch_size: As for `attach`.
        pause_after: Touch `paused-<rank>` after this step and wait to be killed.
    """
    join(folder)
    torch.manual_seed(7)
    model = Net()
    num_ranks, shard = KINDS[kind]
    if shard is not None:
        shape = (num_ranks // 2, 2) if num_ranks == 4 else (1, 2)
        shard(model, init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    shadow = Shadow(model)
    with sdk.attach(
        model,
        optimizer,
        dataset=Sentences(),
        global_batch_size=8,
        micro_batch_size=micro_batch_size,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.8),
        max_grad_norm=0.5,
        total_steps=steps,
        extra_state={"shadow": shadow},
        job="sharded",
        storage=Path(folder, "checkpoints"),
        run_dir=Path(folder, "run"),
        checkpoint={"save_every_seconds": None, "save_every_steps": None},
    ) as session:
        state = TrainingState(model, optimizer, {"shadow": shadow})
        document: dict[str, Any] = {"start": _digests(state), "ids": {}}
        for batch in session:
            document["ids"].setdefault(session.global_step + 1, []).extend(batch["id"].tolist())
            if session.micro_batch.is_last:
                shadow.update(model)  # before the step, whose snapshot is to hold it
            logits = session.model(batch["tokens"][:, :-1])
            session.step(nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten()))
            if session.global_step == pause_after:
                Path(folder, f"paused-{session.rank}").touch()
                signal.pause()
    document["end"] = _digests(state)
    path = Path(folder, f"{session.attempt}-{session.rank}.json")
    path.write_text(json.dumps(document))
    return 0


def _digests(state: TrainingState) -> dict[str, str]:
    digests = {}
    for name, tensor in state.capture()[0].items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digests[name] = hashlib.blake2b(whole.detach().contiguous().numpy().tobytes(), digest_size=8).hexdigest()
    return digests
