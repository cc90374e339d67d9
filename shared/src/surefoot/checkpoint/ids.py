"""How a checkpoint is named: by attempt and step, never by step alone."""

from __future__ import annotations

import re
from typing import NamedTuple


class CheckpointId(NamedTuple):
    """The state after `step` completed global batches, reached by `attempt`. The newest compares highest."""

    attempt: int
    step: int


_FOLDER_NAME = re.compile(r"step-(\d{9,})-a(\d{4,})", re.ASCII)


def folder_name(checkpoint_id: CheckpointId) -> str:
    """Return the folder of a checkpoint, e.g. `step-000000120-a0003`."""
    return f"step-{checkpoint_id.step:09d}-a{checkpoint_id.attempt:04d}"


def parse_folder_name(name: str) -> CheckpointId | None:
    """Return the id that a folder name stands for, None where it is not what `folder_name` makes."""
    match = _FOLDER_NAME.fullmatch(name)
    if match is None:
        return None
    checkpoint_id = CheckpointId(attempt=int(match[2]), step=int(match[1]))
    return checkpoint_id if folder_name(checkpoint_id) == name else None
