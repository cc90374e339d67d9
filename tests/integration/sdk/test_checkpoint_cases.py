"""Field cases C1, C3, C5, C7 and C8 in their whole kind: every file, every harm, any file times, other runs beside it.

Ranks, drains and files are real (`helpers.toy_history`); what each start finds is checked against an oracle, bit for
bit. `test_saves` has C1, C4, C5 and C7 on jobs under the launcher.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.command_line import surefoot
from helpers.forked import Forge
from helpers.jobs import Job
from helpers.stored import store_checkpoint
from helpers.toy_history import History
from helpers.toy_plan import ENDINGS, ORDERS, Damage, Start, Touch
from helpers.waiting import wait_until
from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.events import CheckpointQuarantined, RestoreFellBack
from surefoot.progress import Phase, ProgressPage, progress_path

__all__ = ["surefoot"]

FILES = ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors", "rank-00000.json", "rank-00001.json"]
"""Of a checkpoint of two ranks, as `Damage.file` counts them."""

SAVES = Start(world_size=2, num_steps=2, save_every=1)


def first_quick(values: Iterable[Any]) -> list[Any]:
    """Return the values as parameters, all but the first for the slow tests only."""
    first, *others = values
    return [first, *(pytest.param(value, marks=pytest.mark.slow) for value in others)]


@pytest.fixture
def history(toy_forge: Forge, tmp_path: Path) -> Iterator[History]:
    history = History(tmp_path / "job", toy_forge)
    yield history
    history.close()


def check_quarantined(history: History, checkpoint: CheckpointId, file: str) -> None:
    """The last fall-back came from this file, which an event names; what it was in is out of the way."""
    fell_back = history.oracle.events(RestoreFellBack)[-1]
    assert CheckpointId(fell_back.candidate_attempt, fell_back.candidate_step) == checkpoint
    assert file in fell_back.reason
    quarantined = history.oracle.events(CheckpointQuarantined)[-1]
    assert CheckpointId(quarantined.attempt, quarantined.step) == checkpoint
    assert quarantined.file == file
    assert quarantined.reason
    assert (history.oracle.store.root / quarantined.moved_to / "manifest.json").exists()
    assert checkpoint not in history.oracle.committed()


@pytest.mark.slow  # C8 has each file, test_saves one of each harm, unit/checkpoint both
@pytest.mark.chaos
@pytest.mark.parametrize("how", ["truncate", "delete", "empty"])
def test_c1_each_file_of_the_newest_in_turn(history, how):
    history.do(SAVES)
    for index, file in enumerate(FILES):
        newest = history.oracle.committed()[0]
        history.do(Damage(checkpoint=0, file=index, how=how))
        history.do(SAVES)
        assert history.oracle.records()[index + 2].starts_from.checkpoint_id < newest
        if (how, file) == ("delete", "manifest.json"):
            assert history.oracle.events(RestoreFellBack) == []  # no manifest: there is no such checkpoint
        else:
            check_quarantined(history, newest, file)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", first_quick(range(1, 7)))
def test_c8_one_byte_flipped_anywhere_is_refused_and_verify_names_the_file(history, surefoot, seed):
    source = random.Random(seed)
    history.do(SAVES)
    for index, file in enumerate(FILES):
        newest = history.oracle.committed()[0]
        history.do(Damage(checkpoint=0, file=index, how="flip", where=source.random()))
        verified = surefoot("verify", history.oracle.path(newest))
        assert verified.code == 3
        assert f"{folder_name(newest)}/{file}" in verified.out
        verdicts = json.loads(surefoot("verify", history.oracle.store.root, "--json").out)
        assert [(v["attempt"], v["step"]) for v in verdicts if not v["ok"]] == [newest]
        history.do(SAVES)
        check_quarantined(history, newest, file)
    assert surefoot("verify", history.oracle.store.root).code == 0


@pytest.mark.chaos
@pytest.mark.parametrize("order", first_quick(ORDERS))
def test_c3_file_times_say_nothing(history, surefoot, order):
    """Run A reached step 6; B began again in its folder and reached step 3: that is the newest, whatever the times."""
    history.do(Start(num_steps=6, save_every=2))
    history.do(Start(num_steps=3, save_every=2, from_seed=True))
    history.do(Touch(order))
    listed = json.loads(surefoot("checkpoints", "list", history.oracle.store.root, "--json").out)
    assert [CheckpointId(c["attempt"], c["step"]) for c in listed] == history.oracle.committed()
    assert [c["state"] for c in listed if c["attempt"] == 1] == ["abandoned"] * sum(c["attempt"] == 1 for c in listed)
    shown = json.loads(surefoot("checkpoints", "show", history.oracle.store.root, "--json").out)
    assert (shown["manifest"]["attempt"], shown["manifest"]["step"]) == (2, 3)
    history.do(Start(num_steps=1))
    assert history.oracle.records()[3].starts_from.checkpoint_id == CheckpointId(2, 3)


@pytest.mark.chaos
@pytest.mark.parametrize("attempt", [1, 7])
def test_c3_a_checkpoint_of_another_job_is_neither_used_nor_moved(history, tmp_path, attempt):
    """Higher steps of another job, copied into the folder by mistake: a reason to say so, and no damage."""
    history.do(Start(num_steps=2))
    foreign = CheckpointId(attempt, 100)
    store_checkpoint(tmp_path / "other", foreign)
    shutil.copytree(tmp_path / "other" / folder_name(foreign), history.oracle.path(foreign))
    files = {path.name: path.read_bytes() for path in history.oracle.path(foreign).iterdir()}
    history.oracle.note_unusable(foreign)
    history.do(Start(num_steps=1))
    history.do(Start(num_steps=1))
    starts = [record.starts_from.checkpoint_id for record in history.oracle.records().values()]
    assert starts == [CheckpointId(0, 0), CheckpointId(1, 2), CheckpointId(2, 3)]
    reasons = [event.reason for event in history.oracle.events(RestoreFellBack)]
    # Off the lineage nobody even looks at it: that of attempt 7 never was on it, attempt 2 goes on from step 2 of 1.
    assert len(reasons) == (attempt == 1)
    assert all("is a checkpoint of job 'other'" in reason for reason in reasons)
    assert {path.name: path.read_bytes() for path in history.oracle.path(foreign).iterdir()} == files
    assert history.oracle.quarantined() == []


@pytest.mark.chaos
@pytest.mark.parametrize("ending", first_quick(ENDINGS))
def test_c7_the_retry_of_a_save_has_other_data(history, ending):
    """Rank 1 dies copying step 10, of which rank 0 has its part; attempt 2 reaches another step 10: that one counts."""
    killed = "staging.copied=kill@10"
    history.do(
        Start(world_size=2, num_steps=10, save_every=10, rank_fault=killed, faulty_rank=1, ending=ending),
        Start(world_size=2, num_steps=1, save_every=10),
    )
    assert history.oracle.records()[2].starts_from.checkpoint_id == CheckpointId(1, 9)
    tenth = [i for i in history.oracle.committed() if i.step == 10]
    assert tenth == [CheckpointId(2, 10)]
    history.do(Start(num_steps=1))
    assert history.oracle.records()[3].starts_from.checkpoint_id == CheckpointId(2, 10)


@pytest.mark.chaos
@pytest.mark.parametrize("world_size", [1, 2])
def test_c5_no_rank_exits_before_the_last_save_is_durable(history, world_size):
    """The drain is stopped before the last save: the ranks stay in their last phase until it goes on."""
    with history.stopped_drain() as drain:
        ranks = history.begin(Start(world_size=world_size, num_steps=3, save_every=100))
        pages = [progress_path(history.oracle.staging, rank) for rank in range(world_size)]
        wait_until(lambda: all(phase_of(page) is Phase.CLOSE for page in pages), 20, "the ranks close")
        assert [child.has_ended_within(0.2) for child in ranks.values()] == [False] * world_size
        assert history.oracle.committed() == []
        os.kill(drain, signal.SIGCONT)
        # Looked at the moment the first of them is gone.
        wait_until(lambda: any(child.poll() is not None for child in ranks.values()), 20, "a rank exits", 0.001)
        assert history.oracle.committed() == [CheckpointId(1, 3)]
        assert [child.wait(20) for child in ranks.values()] == [0] * world_size


def phase_of(page: Path) -> Phase | None:
    progress = ProgressPage.open(page).read() if page.exists() else None
    return None if progress is None else progress.phase


@pytest.mark.slow  # the same sdk and drain as above, here under the launcher
@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_c3_two_runs_and_two_jobs_in_one_storage(make_job: Callable[..., Job]) -> None:
    """Run A to step 8, run B of the same job from the seed to step 4, another job beside them; times reversed."""
    job = make_job("a", trainer=["--steps", "8"], checkpoint={"save_every_steps": 2})
    job.run()
    job.trainer = ["--steps", "4"]
    job.run([], "--from-seed")
    other = Job(job.folder, "b", trainer=["--steps", "3"])
    other.run()
    assert other.records()[1].starts_from.checkpoint_id == CheckpointId(0, 0)
    folders = [*job.store.root.iterdir(), *other.store.root.iterdir()]
    for age, path in enumerate(sorted(folders)):
        os.utime(path, (1_700_000_000 - age,) * 2)
    for each, steps, attempt, start in ((job, "6", 3, CheckpointId(2, 4)), (other, "5", 2, CheckpointId(1, 3))):
        each.trainer = ["--steps", steps]
        each.run()
        assert each.records()[attempt].starts_from.checkpoint_id == start
        assert each.events(RestoreFellBack) == []
