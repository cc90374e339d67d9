"""States and jobs that change their way of sharding and their number of ranks: DESIGN 5, field cases R4 and R7."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.forked import Child, Forge
from helpers.waiting import wait_until
from surefoot.checkpoint.attempts import AttemptLog, Source
from surefoot.checkpoint.staging_folder import StagingFolder
from surefoot.checkpoint.store import LocalStore
from surefoot.events import StepCompleted, read_events

LIMIT_SECONDS = 60


@pytest.fixture(scope="module")
def forge() -> Iterator[Forge]:
    with Forge("helpers.sharded_rank") as forge:
        yield forge


def start(forge: Forge, function: str, num_ranks: int, folder: Path, **arguments: Any) -> list[Child]:
    """Start the ranks of a job."""
    folder.mkdir(exist_ok=True)
    (folder / "rendezvous").unlink(missing_ok=True)
    names = ("RANK", "LOCAL_RANK")
    sizes = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    return [
        forge.fork(
            function,
            {"folder": str(folder), **arguments},
            log=folder / f"log-{rank}",
            env=sizes | dict.fromkeys(names, str(rank)),
        )
        for rank in range(num_ranks)
    ]


def wait(children: list[Child], folder: Path) -> None:
    try:
        codes = [child.wait(LIMIT_SECONDS) for child in children]
    finally:
        for child in children:
            child.kill()
    assert not any(codes), "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("log-*")))


def test_every_way_of_sharding_loads_what_every_other_one_saved(forge, tmp_path):
    """1, 2 and 4 ranks; plain, DDP, FSDP2, HSDP, tensor-parallel, both, 2 dimensions; uneven and empty chunks, ties.

    Bit-equal, into an optimizer that has taken a step and into one that has not, and each value once in a checkpoint.
    """
    wait(start(forge, "round_trips", 4, tmp_path), tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert {pair: names for pair, names in results["wrong"].items() if names} == {}
    assert len(results["wrong"]) == 2 * 9 * 9
    sizes = {kind: sum(num_bytes for _, _, num_bytes in parts) for kind, parts in results["stored"].items()}
    assert len(set(sizes.values())) == 1, sizes
    # A session gives every rank samples of its own.
    refused = results["refused"]
    assert {kind for kind, reason in refused.items() if not reason} == {"fsdp-4", "hsdp-4"}
    assert "is placed as (Shard(dim=0),) over 2 of 4 ranks" in refused["fsdp-2"]
    assert "FSDP2 and HSDP over all ranks are allowed" in refused["tp+fsdp-4"]
    assert "fully_shard must have been applied to all of it" in refused["columns-4"]


class Job:
    """A job of one folder, which any way of sharding may go on with."""

    def __init__(self, forge: Forge, folder: Path) -> None:
        self._forge = forge
        self.folder = folder
        # Held, or the drain would remove what is staged between two runs.
        self.staging = StagingFolder.create(Path("/dev/shm"), "sharded", folder / "checkpoints")
        self.staging.hold_session()

    def start(self, kind: str, steps: int, *, micro: int | None = None, pause_after: int | None = None) -> list[Child]:
        return start(
            self._forge,
            "train",
            int(kind.rpartition("-")[2]),
            self.folder,
            kind=kind,
            steps=steps,
            micro_batch_size=micro,
            pause_after=pause_after,
        )

    def run(self, kind: str, steps: int, *, micro: int | None = None) -> list[dict[str, Any]]:
        """Train up to a step; return what each rank wrote about this attempt."""
        wait(self.start(kind, steps, micro=micro), self.folder)
        attempt = max(self.records())
        paths = sorted(self.folder.glob(f"{attempt}-*.json"))
        assert len(paths) == int(kind.rpartition("-")[2])
        return [json.loads(path.read_text()) for path in paths]

    def records(self) -> dict[int, Any]:
        return AttemptLog(LocalStore(self.folder / "checkpoints" / "sharded")).read_all()

    def steps(self) -> list[StepCompleted]:
        events, _ = read_events(self.folder / "run" / "sharded" / "events.jsonl")
        return [event for event in events if isinstance(event, StepCompleted)]

    def forget_staged(self) -> None:
        for path in self.staging.path.glob("rank-*.stage"):
            path.unlink()


@pytest.fixture
def make_job(forge, tmp_path):
    made: list[Job] = []

    def make(name: str) -> Job:
        made.append(Job(forge, tmp_path / name))
        return made[-1]

    yield make
    for job in made:
        job.staging.announce_end()
        job.staging.release_session()
        wait_until(lambda job=job: not job.staging.path.exists(), LIMIT_SECONDS, "the drain has ended")


def ids_by_step(ranks: list[dict[str, Any]]) -> dict[int, list[int]]:
    """Return the sample ids of each global batch, rank after rank."""
    return {int(step): [i for rank in ranks for i in rank["ids"][step]] for step in ranks[0]["ids"]}


def test_r4_r7_a_job_goes_on_with_other_ranks_and_other_sharding(make_job):
    """4, 2, 4, 1, 4 ranks: the ids of every global step, the losses and norms as at one rank, the state bit-equal.

    From staging memory and, every other time, from storage.
    """
    whole = make_job("whole")
    expected = ids_by_step(whole.run("plain-1", 10))
    job = make_job("parts")
    ids: dict[int, list[int]] = {}
    before: dict[str, str] | None = None
    for index, kind in enumerate(["ddp-4", "fsdp-2", "hsdp-4", "plain-1", "fsdp-4"]):
        if index % 2:
            job.forget_staged()
        ranks = job.run(kind, 2 * (index + 1), micro=1 if index % 2 else None)
        ids |= ids_by_step(ranks)
        assert all(rank["start"] == ranks[0]["start"] for rank in ranks)
        assert before in (None, ranks[0]["start"]), kind
        before = ranks[0]["end"]
    assert ids == expected
    sources = [record.starts_from.source for record in job.records().values()]
    assert sources == [Source.SEED, Source.COMMITTED, Source.STAGED, Source.COMMITTED, Source.STAGED]
    steps, reference = job.steps(), whole.steps()
    assert [event.loss for event in steps] == pytest.approx([event.loss for event in reference], rel=1e-4)
    assert [event.grad_norm for event in steps] == pytest.approx([event.grad_norm for event in reference], rel=1e-4)


@pytest.mark.slow  # R1 with DDP is in test_resume, the sharded state above
def test_r1_fsdp_resume_after_a_kill_is_bit_equal(make_job):
    """Every rank SIGKILLed: parameters, moments and step counts as in a run that never stopped."""
    whole = make_job("whole").run("fsdp-2", 6)
    broken = make_job("broken")
    children = broken.start("fsdp-2", 6, pause_after=3)
    paused = [broken.folder / f"paused-{rank}" for rank in range(2)]
    wait_until(lambda: all(path.exists() for path in paused), LIMIT_SECONDS, "both ranks took 3 steps")
    for child in children:
        child.kill()
    assert broken.run("fsdp-2", 6)[0]["end"] == whole[0]["end"]
    assert broken.records()[2].starts_from.step == 3
