"""Does saving leak? Save a 20 MB state again and again; the resident memory of the rank and of its drain.

    python -m bench.checkpoint_growth --out DIR --staging DIR --saves 200

Writes <out>/growth.json: bytes of both after each save.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch

from bench.checkpoint_memory import resident
from bench.checkpoint_size import ADAM_TENSORS
from surefoot import sdk
from surefoot.checkpoint.locks import holder_pid
from surefoot.checkpoint.staging_folder import staging_folder_path
from surefoot.events import CheckpointCommitted, read_events

STATE_BYTES = 20_000_000
NUM_LAYERS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--staging", type=Path, required=True)
    parser.add_argument("--saves", type=int, default=200)
    options = parser.parse_args()
    width = int((STATE_BYTES / ADAM_TENSORS / 4 / NUM_LAYERS) ** 0.5)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(NUM_LAYERS)))
    storage = options.out / "checkpoints"
    session = sdk.attach(
        model,
        torch.optim.AdamW(model.parameters(), fused=True),
        dataset=[torch.full((width,), 1.0 / (i + 1)) for i in range(64)],
        global_batch_size=1,
        job="growth",
        storage=storage,
        run_dir=options.out / "run",
        checkpoint={"save_every_seconds": None, "save_every_steps": 1, "staging_dir": options.staging},
    )
    drain_lock = staging_folder_path(options.staging, "growth", storage) / "drain.lock"
    samples: list[tuple[int, int]] = []
    offset = 0
    for batch in session:
        session.step(session.model(batch).square().mean())
        events, offset = read_events(options.out / "run" / "growth" / "events.jsonl", offset)
        for _ in (event for event in events if isinstance(event, CheckpointCommitted)):
            samples.append((resident(os.getpid()), resident(holder_pid(drain_lock) or 0)))
        if len(samples) >= options.saves:
            break
    session.close()
    (options.out / "growth.json").write_text(json.dumps(samples))


if __name__ == "__main__":
    main()
