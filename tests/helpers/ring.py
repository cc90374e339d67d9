"""A training script without the sdk: a gloo group whose ranks meet in every step, and obey the control page.

    ring.py STEPS [rank=R] [step=S] [what=raise|exit3|usage|sysexit2|importerror]

With the last three words rank R does `what` in step S of every start.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from surefoot.checkpoint.staging_folder import staging_folder_path
from surefoot.errors import UsageError
from surefoot.progress import ControlPage, Phase, ProgressPage, control_path, progress_path
from surefoot.spec import SPEC_ENVIRONMENT_KEY, parse_spec


def misbehave(what: str) -> None:
    if what == "raise":
        raise ValueError("the same every time")
    if what == "exit3":
        sys.exit(3)
    if what == "usage":
        raise UsageError("lr", "must be positive")
    if what == "importerror":
        import surefoot_has_no_such_module  # noqa: F401
    if what == "hangingthread":
        import threading

        threading.Thread(target=time.sleep, args=(1000,)).start()
        raise ValueError("with a thread that does not end")


def main() -> None:
    options = dict(word.split("=") for word in sys.argv[2:])
    rank = int(os.environ["RANK"])
    spec = parse_spec(json.loads(os.environ[SPEC_ENVIRONMENT_KEY]))
    folder = staging_folder_path(spec.checkpoint.staging_dir, spec.job, spec.storage)
    page = ProgressPage.create(progress_path(folder, rank))
    control = ControlPage.open(control_path(folder))
    dist.init_process_group("gloo")
    saves = 0
    for step in range(1, int(sys.argv[1]) + 1):
        stop = torch.tensor(float(control.read().stop_requested))
        if str(rank) == options.get("rank") and str(step) == options.get("step"):
            misbehave(options["what"])
        dist.all_reduce(stop)
        page.write(attempt=1, step=step, start_step=0, phase=Phase.STEP)
        if step == 1:
            print(f"first step of start {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
        if control.read().save_requests > saves:
            saves += 1
            print(f"save {saves}")
        if stop:
            print(f"stopped after step {step}")
            break
        time.sleep(0.005)
    dist.destroy_process_group()
    if "saved" in options:
        Path(options["saved"]).touch()


if __name__ == "__main__":
    main()
