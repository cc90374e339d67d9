"""Case C6, second half: what retention keeps does not fit on storage, so the job is refused before it begins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helpers.checkpoints import commit
from surefoot import preflight
from surefoot.checkpoint import staging
from surefoot.checkpoint.estimate import check_storage_room, most_checkpoints
from surefoot.checkpoint.ids import CheckpointId
from surefoot.errors import UsageError
from surefoot.spec import RetentionSpec, parse_spec

LAST_5 = RetentionSpec()


@pytest.mark.parametrize(
    ("policy", "num_steps", "save_every_steps", "expected"),
    [
        (LAST_5, None, None, 5 + 2 + 1 + 2),
        (RetentionSpec(keep_last=1), None, None, 1 + 2 + 1 + 2),
        (RetentionSpec(keep_best=3), None, None, 13),
        (RetentionSpec(keep_every_steps=100), 1000, None, 20),
        (RetentionSpec(keep_every_steps=100), None, None, 10),  # no end is known
        (LAST_5, 3, None, 3),  # each step saved
        (LAST_5, 1000, 300, 4),  # 300, 600, 900 and the last
        (RetentionSpec(keep_last=None), 1000, 100, 11),
        (RetentionSpec(keep_last=None), None, None, 5),
    ],
)
def test_every_rule_is_counted_in_full(
    policy: RetentionSpec, num_steps: int | None, save_every_steps: int | None, expected: int
) -> None:
    assert most_checkpoints(policy, num_steps, save_every_steps) == expected


@pytest.fixture
def free_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 GiB are free wherever one asks."""

    class Status:
        f_bavail, f_frsize = 10 * 2**18, 4096

    monkeypatch.setattr(staging.os, "statvfs", lambda path: Status() if Path(path).is_dir() else 1 / 0)


@pytest.mark.usefixtures("free_gib")
def test_c6_what_does_not_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "not yet there" / "demo"
    check_storage_room(folder, LAST_5, 2**30)
    with pytest.raises(UsageError) as refused:
        check_storage_room(folder, LAST_5, 2**30 + 1)
    assert refused.value.key == "storage"
    assert str(refused.value) == (
        f"storage: {folder.parent} has 10.00 GiB free, but there may be 10 checkpoints of 1.00 GiB at once, 10.00 GiB "
        "(checkpoint.retention keep_last: 5, keep_stable: 2, and 2 being written); free some, point storage at a "
        "larger file system, or lower checkpoint.retention"
    )


@pytest.mark.usefixtures("free_gib")
def test_what_the_job_has_there_is_room_since_it_is_replaced(tmp_path: Path) -> None:
    held = commit(tmp_path / "demo", CheckpointId(1, 10)) / "rank-00000.safetensors"
    os.posix_fallocate(os.open(held, os.O_RDWR), 0, 2**20)
    check_storage_room(tmp_path / "demo", LAST_5, 2**30 + 2**16)
    with pytest.raises(UsageError, match=r"and holds 0\.00 GiB of this job"):
        check_storage_room(tmp_path / "demo", LAST_5, 2**30 + 2**18)


@pytest.mark.usefixtures("free_gib")
@pytest.mark.parametrize(("keep_last", "goes_on", "fits"), [(1, False, True), (50, False, False), (50, True, True)])
def test_a_recipe_is_refused_before_it_begins_but_not_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_last: int, goes_on: bool, fits: bool
) -> None:
    monkeypatch.setattr(preflight, "CHECKS", [preflight._check_storage_room])
    spec = parse_spec(
        {
            "job": "demo",
            "entrypoint": "-m surefoot_worker.recipe",
            "storage": str(tmp_path),
            "checkpoint": {"retention": {"keep_last": keep_last}},
            "recipe": {"model": {"hidden_size": 768, "num_hidden_layers": 4, "vocab_size": 4096}, "steps": 1000},
        }
    )
    if goes_on:
        tmp_path.joinpath("demo", "attempts").mkdir(parents=True)
    if fits:
        preflight.check(spec)
    else:
        with pytest.raises(UsageError, match=r"^storage: .* lower checkpoint\.retention"):
            preflight.check(spec)
