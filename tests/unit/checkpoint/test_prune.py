"""Case C2 and the crashes of retention: marks, trash, and what readers see meanwhile."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.checkpoints import commit
from helpers.staging import claim
from helpers.stored import store_checkpoint
from surefoot import faultpoints
from surefoot.checkpoint import marks
from surefoot.checkpoint.attempts import RESERVE_KEY
from surefoot.checkpoint.catalog import list_committed, read_manifest, verify
from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.checkpoint.prune import FactReader, has_trash, plan, prune
from surefoot.checkpoint.store import LocalStore
from surefoot.errors import AttemptError, CheckpointError, DamagedCheckpoint, UsageError
from surefoot.events import CheckpointPruned
from surefoot.spec import RetentionSpec

LAST_1 = RetentionSpec(keep_last=1)
LAST_2 = RetentionSpec(keep_last=2)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    made = LocalStore(tmp_path / "demo")
    claim(made, after=0)
    return made


@pytest.fixture(autouse=True)
def no_faults_left() -> Iterator[None]:
    yield
    faultpoints.plan("")


class Storage(LocalStore):
    """Lets something happen right before a checkpoint is moved."""

    def __init__(self, root: Path, before_move: Callable[[str], None]) -> None:
        super().__init__(root)
        self.before_move = before_move

    def move(self, source: str, target: str) -> None:
        self.before_move(source)
        super().move(source, target)


def id_of(step: int, attempt: int = 1) -> CheckpointId:
    return CheckpointId(attempt, step)


def save(store: LocalStore, *steps: int, attempt: int = 1) -> None:
    for step in steps:
        commit(store.root, id_of(step, attempt), world_size=1)


def steps(store: LocalStore) -> list[int]:
    return [id_.step for id_ in list_committed(store)]


def run(store: LocalStore, policy: RetentionSpec = LAST_1, **how: object) -> list[int]:
    how.setdefault("reader", FactReader(store, promotes=False))
    return [id_.step for id_, _ in prune(store, policy, job="demo", **how)]  # type: ignore[arg-type]


def test_what_nothing_keeps_is_gone_with_one_event_each(store: LocalStore) -> None:
    save(store, 10, 20, 30)
    events: list[CheckpointPruned] = []
    sizes = {step: read_manifest(store, id_of(step)).num_bytes for step in (10, 20, 30)}
    assert [id_.step for id_, _ in plan(store, LAST_1, reader=FactReader(store, promotes=False))] == [10, 20]
    assert steps(store) == [10, 20, 30]

    assert run(store, emit=events.append) == [10, 20]
    assert steps(store) == [30]
    assert not has_trash(store)
    assert not store.root.joinpath(folder_name(id_of(10))).exists()
    assert [(e.job, e.attempt, e.step, e.num_bytes) for e in events] == [
        ("demo", 1, 10, sizes[10]), ("demo", 1, 20, sizes[20]),
    ]  # fmt: skip
    assert events[0].reason == "not among the last 1, not among the newest 2 STABLE, not pinned"
    assert run(store, emit=events.append) == []
    assert len(events) == 2


def test_the_first_one_waits_for_its_promotion_where_somebody_promotes(store: LocalStore) -> None:
    save(store, 10, 20, 30)
    assert run(store, reader=FactReader(store)) == [20]


def test_the_loss_in_the_scalars_decides_which_are_best(store: LocalStore) -> None:
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: 9.0}
    for step, loss in losses.items():
        store_checkpoint(store.root, id_of(step), scalars={"updates": step, "loss": loss})
    assert run(store, RetentionSpec(keep_last=1, keep_best=1)) == [10, 30]


def test_what_the_newest_attempt_started_from_stays(store: LocalStore) -> None:
    save(store, 10, 20, 30)
    claim(store, after=1, attempt=1, step=10)
    save(store, 15, attempt=2)
    assert run(store) == [20, 30]  # abandoned
    save(store, 25, attempt=2)
    assert run(store) == [15]
    assert steps(store) == [10, 25]


def test_until_something_current_is_committed_abandoned_ones_stay(store: LocalStore) -> None:
    save(store, 10, 20)
    claim(store, after=1)
    assert run(store) == []
    save(store, 5, attempt=2)
    assert run(store) == [10, 20]


def test_what_is_protected_or_pinned_stays_and_unpinned_goes(store: LocalStore) -> None:
    save(store, 10, 20, 30)
    marks.pin(store, id_of(10), "the paper's figure 3", "ada")
    assert run(store, protected={id_of(20)}) == []
    assert run(store) == [20]
    assert marks.unpin(store, id_of(10))
    assert run(store) == [10]


def test_only_what_is_named_goes(store: LocalStore) -> None:
    save(store, 10, 20, 30)
    assert run(store, only={id_of(20)}) == [20]
    assert run(store, only=()) == []


def test_without_its_attempt_records_nothing_goes(store: LocalStore) -> None:
    """The lineage is not known: a record is missing, damaged, or storage is another one."""
    save(store, 10, 20, 30)
    claim(store, after=1, attempt=1, step=30)
    record = store.root / "attempts" / "000001.json"
    content = record.read_bytes()
    for broken in (content[:10], None):
        record.unlink() if broken is None else record.write_bytes(broken)
        with pytest.raises(AttemptError):
            run(store)
    store.root.joinpath("attempts", "000002.json").unlink()
    assert run(store) == []
    assert steps(store) == [10, 20, 30]


def test_a_damaged_newest_one_pushes_out_nothing(store: LocalStore) -> None:
    """Case C2: keep = 1, and the newest turns out damaged."""
    save(store, 10, 20)
    manifest = store.root / folder_name(id_of(20)) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    assert run(store) == []
    assert steps(store) == [10, 20]


def test_whoever_has_a_file_open_reads_on(store: LocalStore) -> None:
    save(store, 10, 20)
    manifest = read_manifest(store, id_of(10))
    with store.read(f"{folder_name(id_of(10))}/{manifest.shard(0).file}") as file:
        half = file.read(manifest.shard(0).num_bytes // 2)
        assert run(store) == [10]
        assert len(half + file.readall()) == manifest.shard(0).num_bytes


def test_on_a_full_disk_the_reserve_makes_room_for_making_room(store: LocalStore) -> None:
    """Case C6: nothing else may be needed to remove what is not."""
    save(store, 10, 20)
    assert RESERVE_KEY in store.list("")
    faultpoints.plan("store.write.opened=enospc")
    assert run(store) == [10]
    assert RESERVE_KEY not in store.list("")


@pytest.mark.parametrize("what", ["pinned", "promoted", "newest quarantined", "protected", "started from"])
def test_what_comes_to_be_wanted_at_the_last_moment_is_put_back(store: LocalStore, what: str) -> None:
    save(store, 10, 20)

    def happens(source: str) -> None:
        if source != folder_name(id_of(10)):
            return
        if what == "pinned":
            marks.pin(store, id_of(10), "just in time", "ada")
        elif what == "promoted":
            marks.promote(store, id_of(10), stable_mark(10))
        elif what == "started from":
            claim(store, after=1, attempt=1, step=10)
        elif what == "newest quarantined":
            store.move(folder_name(id_of(20)), f"quarantine/{folder_name(id_of(20))}")

    if what == "protected":
        faultpoints.plan("prune.moved=eio")
        with pytest.raises(OSError, match="fault point"):
            run(store)
        assert steps(store) == [20]
        assert run(store, protected={id_of(10)}) == []
    else:
        assert run(Storage(store.root, happens)) == []
    assert id_of(10) in list_committed(store)
    verify(store, id_of(10))
    assert not has_trash(store)


def stable_mark(step: int) -> marks.StableMark:
    return marks.StableMark.model_validate(
        {
            "job": "demo", "attempt": 1, "step": step, "cleared_attempt": 1, "cleared_through_step": step + 20,
            "probation_steps": 20, "promoted_at": "2026-12-01T12:00:00Z",
        }
    )  # fmt: skip


POINTS = (
    "prune.noted", "store.move.renamed", "prune.moved", "prune.checked", "store.delete.hidden", "prune.deleted",
    "prune.told", "store.write.opened", "store.write.written", "store.write.renamed",
)  # fmt: skip


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_anywhere_is_finished_by_the_next(store: LocalStore, point: str, nth: int, tmp_path: Path) -> None:
    save(store, 10, 20, 30)
    told = tmp_path / "told"

    def note(event: CheckpointPruned) -> None:
        with told.open("a") as file:
            file.write(f"{event.event_id} {event.step} {event.num_bytes}\n")

    assert in_child(lambda: run(store, emit=note), f"{point}=kill@{nth}") == -signal.SIGKILL
    for id_ in list_committed(store):
        verify(store, id_)
    assert steps(store)[-1] == 30
    run(store, emit=note)

    assert steps(store) == [30]
    verify(store, id_of(30))
    assert not has_trash(store)
    store.remove_debris()
    assert sorted(p.name for p in store.root.iterdir()) == sorted(
        ["attempts", RESERVE_KEY, folder_name(id_of(30)), *(["trash"] if store.root.joinpath("trash").exists() else [])]
    )
    lines = told.read_text().splitlines()
    assert {line.split()[1] for line in lines} == {"10", "20"}
    assert len(set(lines)) == 2  # told twice it is the same event
    assert all(int(line.split()[2]) > 0 for line in lines)


@pytest.mark.parametrize("point", ["prune.noted", "store.move.renamed", "prune.moved", "prune.checked"])
def test_what_is_pinned_after_a_kill_is_put_back(store: LocalStore, point: str) -> None:
    save(store, 10, 20)
    assert in_child(lambda: run(store), f"{point}=kill") == -signal.SIGKILL
    trashed = store.root / "trash" / folder_name(id_of(10))
    folder = trashed if trashed.exists() else store.root / folder_name(id_of(10))
    folder.joinpath("pinned.json").write_text("{}")  # also one that says nothing keeps it
    assert run(store) == []
    assert steps(store) == [10, 20]
    assert not has_trash(store)


def test_one_that_was_written_again_while_it_lay_in_trash_is_there_once(store: LocalStore) -> None:
    save(store, 10, 20)
    for kept in (False, True):
        store.move(folder_name(id_of(10)), f"trash/{folder_name(id_of(10))}")
        save(store, 10)
        assert run(store, protected={id_of(10)} if kept else ()) == ([] if kept else [10])
        assert not has_trash(store)
        save(store, 10)
    assert steps(store) == [10, 20]


def test_one_that_cannot_be_read_stays_and_the_others_go(store: LocalStore) -> None:
    save(store, 10, 20, 30, 40)
    part = store.root / folder_name(id_of(20)) / "rank-00000.json"
    part.unlink()
    part.mkdir()  # reading fails: EISDIR
    assert run(store) == [10, 30]
    assert steps(store) == [20, 40]


def test_several_may_prune_at_once(store: LocalStore) -> None:
    for step in range(10, 210, 10):
        commit(store.root, id_of(step), world_size=1)
    pids = [start(lambda: run(store, LAST_2)) for _ in range(3)]
    assert [end(pid) for pid in pids] == [0, 0, 0]
    run(store, LAST_2)
    assert steps(store) == [190, 200]
    assert not has_trash(store)


def test_c2_the_newest_durable_one_survives_at_every_moment(store: LocalStore) -> None:
    """Case C2: keep = 1, saves one after the other, the one who saves and prunes killed at random moments."""
    rng = random.Random(4)
    deadline = time.monotonic() + 30
    seen: set[int] = set()
    pid, num_kills, kill_at = 0, 0, 0.0
    while len(seen) < 8 or num_kills < 4:
        assert time.monotonic() < deadline
        if not pid:
            pid, kill_at = start(lambda: save_and_prune(store)), time.monotonic() + rng.uniform(0.02, 0.2)
        newest = newest_good(store)
        assert (newest or 0) >= max(seen, default=0)
        seen |= {newest} if newest else set()
        if time.monotonic() > kill_at:
            os.kill(pid, signal.SIGKILL)
            assert end(pid) == -signal.SIGKILL
            pid, num_kills = 0, num_kills + 1
    if pid:
        os.kill(pid, signal.SIGKILL)
        end(pid)
    run(store)
    assert steps(store) == [max(seen | set(steps(store)))]


def newest_good(store: LocalStore) -> int | None:
    """Return the step of the newest checkpoint, read in full; one that was removed meanwhile has a newer one."""
    while ids := list_committed(store):
        with suppress(DamagedCheckpoint):
            verify(store, ids[-1])
            return ids[-1].step
        assert [id_ for id_ in list_committed(store) if id_ > ids[-1]], "the newest one went without a newer one"
    return None


def save_and_prune(store: LocalStore) -> None:
    while True:
        store.remove_debris()
        save(store, max([0, *steps(store)]) + 10)
        run(store)


def start(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def end(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_child(work: Callable[[], object], fault: str) -> int:
    def planned() -> None:
        faultpoints.plan(fault)
        work()

    return end(start(planned))


def test_a_pin_says_who_and_why(store: LocalStore) -> None:
    save(store, 10)
    assert marks.read_pin(store, id_of(10)) is None
    made = marks.pin(store, id_of(10), "baseline", "ada")
    assert marks.read_pin(store, id_of(10)) == made
    assert (made.reason, made.pinned_by) == ("baseline", "ada")
    assert marks.pin(store, id_of(10), "another reason", "bob") == marks.read_pin(store, id_of(10))
    verify(store, id_of(10))  # a mark is no damage
    assert [marks.unpin(store, id_of(10)), marks.unpin(store, id_of(10))] == [True, False]


def test_what_does_not_exist_cannot_be_marked(store: LocalStore) -> None:
    for call in (
        lambda: marks.pin(store, id_of(10), "why", "who"),
        lambda: marks.unpin(store, id_of(10)),
        lambda: marks.promote(store, id_of(10), stable_mark(10)),
    ):
        with pytest.raises(CheckpointError, match="step-000000010-a0001: no committed checkpoint is there"):
            call()
    assert store.list("") == ["attempts", RESERVE_KEY]
    save(store, 10)
    with pytest.raises(UsageError, match="reason"):
        marks.pin(store, id_of(10), " ", "who")


def test_a_checkpoint_that_goes_while_it_is_marked_leaves_nothing(store: LocalStore) -> None:
    save(store, 10)

    class Gone(LocalStore):
        def write(self, key: str, *args: object, **kwargs: object):
            self.delete(folder_name(id_of(10)))
            return super().write(key, *args, **kwargs)

    with pytest.raises(CheckpointError, match="no committed checkpoint"):
        marks.pin(Gone(store.root), id_of(10), "why", "who")
    assert store.list("") == ["attempts", RESERVE_KEY]


def test_a_mark_that_cannot_be_read_is_named(store: LocalStore) -> None:
    save(store, 10)
    store.write(f"{folder_name(id_of(10))}/pinned.json", [b'{"reason": 1}'])
    with pytest.raises(CheckpointError, match=r"pinned\.json: cannot be understood"):
        marks.read_pin(store, id_of(10))


def test_a_promotion_stays_as_it_was_first(store: LocalStore) -> None:
    save(store, 10)
    marks.promote(store, id_of(10), stable_mark(10))
    marks.promote(store, id_of(10), stable_mark(10).model_copy(update={"cleared_through_step": 99}))
    assert marks.read_stable(store, id_of(10)) == stable_mark(10)
