"""Where services run a job the writer removes its checkpoints, and the job's own drain must know."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helpers.waiting import wait_until
from surefoot.errors import UsageError
from surefoot.preflight import check
from surefoot.spec import parse_spec
from surefoot_worker.service.launcher_process import LauncherProcess

SAYS = """
import os
from surefoot.checkpoint.retention import drain_prunes
print('drain prunes:', drain_prunes(os.environ))
"""


def test_a_launcher_of_the_worker_service_is_told(tmp_path: Path) -> None:
    spec = parse_spec({"job": "demo", "entrypoint": "train.py", "run_dir": str(tmp_path)})
    process = LauncherProcess(spec, cause="test", from_seed=False, command=(sys.executable, "-c", SAYS))
    wait_until(lambda: process.poll() is not None, 20.0, "said")
    assert process.explanation() == "drain prunes: False"


def test_a_spec_cannot_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("train.py").write_text("")
    spec = parse_spec({"job": "demo", "entrypoint": "train.py", "env": {"SUREFOOT_WRITER_PRUNES": "1"}})
    with pytest.raises(UsageError, match=r"^env\.SUREFOOT_WRITER_PRUNES: is set by the launcher"):
        check(spec)
