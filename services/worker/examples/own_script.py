"""Your own training script with Surefoot in it: a small character model on the text of this file.

surefoot run services/worker/examples/own_script.yaml          # kill any of its ranks: it goes on
torchrun --nproc-per-node 2 services/worker/examples/own_script.py --steps 200
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from surefoot import sdk

CONTEXT = 32


class Text(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Every window of CONTEXT + 1 bytes of a file."""

    def __init__(self, path: Path) -> None:
        self._bytes = torch.tensor(list(path.read_bytes()))

    def __len__(self) -> int:
        return len(self._bytes) - CONTEXT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self._bytes[index : index + CONTEXT + 1]
        return {"x": window[:-1], "y": window[1:]}


class Model(nn.Module):
    """A recurrent next-byte model."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.output = nn.Linear(width, 256)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross-entropy; x and y are int64 [batch, CONTEXT]."""
        hidden, _ = self.recurrent(self.embedding(x))
        return nn.functional.cross_entropy(self.output(hidden).flatten(0, 1), y.flatten())


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=3e-3)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)

    session = sdk.attach(
        model,
        optimizer,
        lr_scheduler=scheduler,
        dataset=Text(Path(__file__)),
        global_batch_size=32,
        max_grad_norm=1.0,
        total_steps=arguments.steps,
    )
    for batch in session:
        loss = session.model(**batch)
        session.step(loss)
        if session.rank == 0 and session.global_step % 20 == 0:
            print(f"step {session.global_step} loss {loss.item():.3f} attempt {session.attempt}")
    if session.rank == 0 and not session.stopped:
        print(f"finished after {session.global_step} steps")  # here: final evaluation, export


if __name__ == "__main__":
    main()
