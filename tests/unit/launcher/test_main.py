from __future__ import annotations

import mmap
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from surefoot.checkpoint.attempts import AttemptLog, Source, StartsFrom
from surefoot.checkpoint.store import LocalStore
from surefoot_worker.launcher.entrypoint import Entrypoint, Import, imports_of
from surefoot_worker.launcher.hugepages import collapse_memory
from surefoot_worker.launcher.records import restart_history, until_claimed


def claim(log: AttemptLog, number: int, cause: str, age_seconds: float) -> None:
    starts_from = StartsFrom(attempt=number - 1, step=0, source=Source.STAGED if number > 1 else Source.SEED)
    moment = datetime.now(UTC) - timedelta(seconds=age_seconds)
    log.claim(after=number - 1, starts_from=starts_from, cause=cause, world_size=2, host="h", started_at=moment)


def test_p4_a_new_launcher_counts_the_restarts_of_the_one_before(tmp_path: Path) -> None:
    log = AttemptLog(LocalStore(tmp_path))
    assert restart_history(log, 600).restarted_at == ()
    claim(log, 1, "started by the user", 650)
    claim(log, 2, "restart: rank 0 was killed by SIGKILL", 601)
    claim(log, 3, "restart: rank 0 was killed by SIGKILL", 100)
    claim(log, 4, "started by the user", 50)
    claim(log, 5, "restart: rank 1 was killed by SIGKILL", 10)
    assert len(restart_history(log, 600).restarted_at) == 2


def test_from_seed_holds_until_an_attempt_is_claimed(tmp_path: Path) -> None:
    log = AttemptLog(LocalStore(tmp_path))
    claim(log, 1, "started by the user", 50)
    still = until_claimed(AttemptLog(LocalStore(tmp_path)), from_seed=True)
    assert still()
    assert still()
    claim(log, 2, "started by the user", 0)
    assert not still()
    assert not until_claimed(AttemptLog(LocalStore(tmp_path)), from_seed=False)()


def test_only_unconditional_imports_are_preloaded_and_the_file_does_not_run(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "from __future__ import annotations\nimport os.path, json as j\nfrom torch import nn\n"
        "try:\n    import not_there\nexcept ImportError:\n    pass\nraise SystemExit(1)\n"
    )
    entrypoint = Entrypoint.parse([str(path), "-x"])
    assert imports_of(entrypoint) == [Import("os.path"), Import("json"), Import("torch", ("nn",))]
    assert entrypoint.path0() == str(tmp_path)


@pytest.mark.parametrize("text", ["import (", None])
def test_a_file_that_cannot_be_parsed_or_found_has_no_imports(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "own.py"
    if text is not None:
        path.write_text(text)
    assert imports_of(Entrypoint.parse([str(path)])) == []


def test_collapsing_changes_no_byte() -> None:
    content = os.urandom(2**20) * 8
    with mmap.mmap(-1, len(content), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = content
        assert collapse_memory() >= 0
        assert memory[:] == content
