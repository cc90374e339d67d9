"""Case P3 in one job: rank 1 raises at step 5, in the next start leaves its loop early, in the one after it sleeps."""

import os
import threading

import torch

from surefoot import sdk

STEPS = 10


class Samples:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(8) * (index + 1.0))


def sleep_for_ever() -> None:
    threading.Event().wait()


def main() -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    session = sdk.attach(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        dataset=Samples(),
        global_batch_size=4,
        total_steps=STEPS,
    )
    guilty = session.rank == 1
    start = os.environ["TORCHELASTIC_RESTART_COUNT"]
    for batch in session:
        step = session.global_step + 1
        if guilty and (start, step) == ("0", 5):
            raise ValueError("bad luck on rank 1")
        if guilty and (start, step) == ("1", 7):
            break
        if guilty and (start, step) == ("2", 9):
            sleep_for_ever()
        session.step(session.model(batch).pow(2).mean())


if __name__ == "__main__":
    main()
