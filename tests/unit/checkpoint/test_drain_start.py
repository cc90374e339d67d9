"""What a drain is started with."""

from __future__ import annotations

import os

from helpers.staging import Ranks, claim
from surefoot.checkpoint.catalog import list_committed
from surefoot.checkpoint.drain_start import drain_log, start_drain
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.staging_folder import StagingFolder
from surefoot.checkpoint.store import LocalStore
from surefoot.spec import JobSpec


def test_files_of_the_user_in_the_current_folder_are_not_imported(tmp_path, monkeypatch):
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    for name in ("redis", "xxhash", "json"):
        (cwd / f"{name}.py").write_text("raise SystemExit('the file of the user was imported')\n")
    monkeypatch.chdir(cwd)
    storage = tmp_path / "storage"
    spec = JobSpec(job="job", entrypoint="train.py", storage=storage, run_dir=tmp_path / "run")
    folder = StagingFolder.create(tmp_path / "staging", "job", storage)
    claim(LocalStore(storage / "job"), 0)
    Ranks(folder, attempt=1).save(10, persist=True)
    status = os.waitpid(start_drain(spec, folder.path, prune=False), 0)[1]
    assert status == 0, drain_log(spec).read_text()
    assert list_committed(LocalStore(storage / "job")) == [CheckpointId(1, 10)]
