"""Where a session gets its settings: the spec of the launcher, then the arguments, then the defaults."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.checkpoint.attempts import RESTART_CAUSE_PREFIX
from surefoot.errors import UsageError
from surefoot.spec import (
    CAUSE_ENVIRONMENT_KEY,
    FROM_SEED_ENVIRONMENT_KEY,
    SPEC_ENVIRONMENT_KEY,
    CheckpointSpec,
    JobSpec,
    parse_spec,
)


@dataclass(frozen=True)
class SessionSettings:
    """What `attach` runs with.

    Attributes:
        spec: The validated settings; `entrypoint` is only informative here.
        cause: Why this start happens, for the attempt record.
        from_seed: The user said to start over although the job had progress.
    """

    spec: JobSpec
    cause: str
    from_seed: bool

    @property
    def checkpoint(self) -> CheckpointSpec:
        """When and where to snapshot and save."""
        return self.spec.checkpoint


def resolve(arguments: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> SessionSettings:
    """Merge the settings. A key that the spec sets wins over an argument: who runs the job has the last word.

    Args:
        arguments: What the script passed to `attach`: any of job, storage, run_dir, seed, checkpoint (a mapping
            with the keys of CheckpointSpec). None means not passed.
        environment: The process environment.

    Raises:
        UsageError: a wrong key or value.
    """
    from_spec: dict[str, Any] = json.loads(environment.get(SPEC_ENVIRONMENT_KEY, "{}"))
    merged: dict[str, Any] = {"job": default_job_name(), "entrypoint": sys.argv[0] or "python"}
    merged |= {key: value for key, value in arguments.items() if value is not None}
    checkpoint = merged.get("checkpoint", {})
    if not isinstance(checkpoint, Mapping):
        raise UsageError("checkpoint", f"must be a mapping such as {{'save_every_steps': 100}}, got {checkpoint!r}")
    merged |= from_spec
    merged["checkpoint"] = dict(checkpoint) | from_spec.get("checkpoint", {})
    return SessionSettings(
        spec=parse_spec(merged).absolute(),
        cause=environment.get(CAUSE_ENVIRONMENT_KEY) or _cause_under_torchrun(environment),
        from_seed=environment.get(FROM_SEED_ENVIRONMENT_KEY) == "1",
    )


def _cause_under_torchrun(environment: Mapping[str, str]) -> str:
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return "started by the user" if restarts == "0" else f"{RESTART_CAUSE_PREFIX}number {restarts}, by torchrun"


def default_job_name() -> str:
    """Return the script's name as a job name, for scripts that do not name their job."""
    name = re.sub(r"[^a-z0-9._-]+", "-", Path(sys.argv[0] or "job").stem.lower()).lstrip("._-")
    return name[:63] or "job"
