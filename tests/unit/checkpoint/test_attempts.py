from __future__ import annotations

import errno
import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone

import pytest
from pydantic import ValidationError

from surefoot import faultpoints
from surefoot.checkpoint.attempts import (
    RESERVE_BYTES,
    RESERVE_KEY,
    AttemptLog,
    AttemptRecord,
    SkipWindow,
    Source,
    StartsFrom,
)
from surefoot.checkpoint.store import LocalStore
from surefoot.errors import AttemptError, AttemptTaken

NOW = datetime(2026, 12, 1, 12, 0, tzinfo=UTC)
SEED = StartsFrom(attempt=0, step=0, source=Source.SEED)


def claim(log: AttemptLog, after: int, starts_from: StartsFrom = SEED, **changes) -> AttemptRecord:
    fields = {"cause": "test", "world_size": 2, "host": "here", "started_at": NOW} | changes
    return log.claim(after=after, starts_from=starts_from, **fields)


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "job")


@pytest.fixture
def log(store) -> AttemptLog:
    return AttemptLog(store)


def test_a_new_job_has_no_attempts(log, store):
    assert log.newest() is None
    assert log.read_all() == {}
    assert not store.root.exists()


def test_another_process_reads_exactly_what_was_claimed(log, store):
    first = claim(log, 0)
    second = claim(
        log,
        1,
        StartsFrom(attempt=1, step=120, source=Source.COMMITTED),
        lr_factor=0.1 + 0.2,
        skip_windows=(SkipWindow(start=100, stop=121), SkipWindow(start=300, stop=301)),
        cause="roll-back: Verlust ∞",
    )
    fresh = AttemptLog(store)
    assert fresh.read_all() == {1: first, 2: second}
    assert fresh.newest() == second
    assert store.list("attempts") == ["000001.json", "000002.json"]


def test_times_are_kept_in_utc(log):
    record = claim(log, 0, started_at=datetime(2026, 12, 1, 13, 0, tzinfo=timezone(timedelta(hours=1))))
    assert record.started_at == NOW
    assert record.started_at.utcoffset() == timedelta(0)


@pytest.mark.parametrize(
    "changes",
    [
        {"started_at": datetime(2026, 12, 1)},
        {"lr_factor": 0.0},
        {"lr_factor": float("nan")},
        {"world_size": 0},
        {"starts_from": {"attempt": 1, "step": 5, "source": "COMMITTED"}},
        {"starts_from": {"attempt": 0, "step": 5, "source": "SEED"}},
        {"starts_from": {"attempt": 0, "step": 0, "source": "STAGED"}},
        {"skip_windows": [{"start": 5, "stop": 5}]},
        {"surprise": 1},
    ],
)
def test_a_record_that_makes_no_sense_is_refused(log, changes):
    fields = json.loads(claim(log, 0).model_dump_json()) | changes
    with pytest.raises(ValidationError):
        AttemptRecord.model_validate(fields)


def test_claiming_a_number_that_is_taken_fails_and_changes_nothing(log, store):
    first = claim(log, 0)
    with pytest.raises(AttemptTaken):
        claim(AttemptLog(store), 0, cause="too late")
    assert AttemptLog(store).read_all() == {1: first}


def test_claiming_behind_a_newer_attempt_fails_even_where_the_number_is_free(log, store):
    claim(log, 0)
    claim(log, 1)
    store.delete("attempts/000001.json")
    with pytest.raises(AttemptTaken):
        claim(log, 0)


def test_claiming_after_an_attempt_without_a_record_is_refused(log):
    claim(log, 0)
    with pytest.raises(AttemptError, match="newest record is 1"):
        claim(log, 5)


@pytest.mark.parametrize(
    "left", ["step-000000030-a0007", "quarantine/step-000000030-a0007-2", "trash/step-000000030-a0007"]
)
def test_where_records_were_lost_the_first_claim_is_above_all_that_is_left(log, store, left):
    """Or what is left of an attempt 1 of before would count as the new one's own."""
    store.write(f"{left}/manifest.json", [b"{}"])
    assert claim(log, 0).attempt == 8
    assert claim(log, 8).attempt == 9


def test_a_record_that_is_nested_without_end_is_damaged(log, store):
    store.write("attempts/000001.json", [b"[" * 200_000])
    with pytest.raises(AttemptError, match="nested too deeply"):
        log.read_all()


def test_a_log_sees_attempts_of_others(log, store):
    claim(log, 0)
    claim(AttemptLog(store), 1)
    assert log.newest().attempt == 2


def test_recent_counts_the_records_in_the_window(log):
    for attempt, seconds_ago in enumerate([900, 601, 599, 10, -30]):
        claim(log, attempt, started_at=NOW - timedelta(seconds=seconds_ago))
    assert log.recent(600, NOW) == 3
    assert log.recent(5, NOW) == 1
    assert log.recent(10_000, NOW) == 5


def _damage(content: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "half": content[: len(content) // 2],
        "zeros": bytes(len(content)),
        "binary": b"\xff\xfe" + content,
        "list": b"[]",
        "missing field": b'{"version": 1, "attempt": 2}',
        "other number": content.replace(b'"attempt":2', b'"attempt":3').replace(b'"attempt": 2', b'"attempt": 3'),
        "newer version": content.replace(b'"version":1', b'"version":2').replace(b'"version": 1', b'"version": 2'),
    }


@pytest.mark.parametrize("damage", list(_damage(b"")))
def test_a_damaged_record_is_an_error_that_names_the_file(log, store, damage):
    claim(log, 0)
    claim(log, 1)
    path = store.root / "attempts" / "000002.json"
    damaged = _damage(path.read_bytes())[damage]
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    fresh = AttemptLog(store)
    for read in (fresh.read_all, fresh.newest, lambda: fresh.recent(1, NOW)):
        with pytest.raises(AttemptError) as caught:
            read()
        assert str(path) in str(caught.value)


def test_a_record_file_with_a_strange_name_is_an_error_that_names_it(log, store):
    claim(log, 0)
    (store.root / "attempts" / "2.json").write_text("{}")
    with pytest.raises(AttemptError, match=r"attempts/2\.json"):
        log.newest()


def test_files_that_are_no_records_do_not_matter(log, store):
    record = claim(log, 0)
    (store.root / "attempts" / ".tmp-1-ab-000002.json").write_text("half")
    (store.root / "attempts" / "000001.json~").write_text("an editor's copy")
    assert AttemptLog(store).read_all() == {1: record}


def test_a_reserve_is_kept_on_the_disk(log, store):
    claim(log, 0)
    assert (store.root / RESERVE_KEY).stat().st_size == RESERVE_BYTES


@pytest.mark.parametrize("point", ["store.write.opened", "store.write.some", "store.write.synced"])
def test_on_a_full_disk_the_reserve_is_freed_and_the_record_written(log, store, monkeypatch, point):
    claim(log, 0)
    freed = []
    delete = store.delete
    monkeypatch.setattr(store, "delete", lambda key: (freed.append(key), delete(key)))
    monkeypatch.setattr(faultpoints, "_plan", {point: ("enospc", 1)})
    monkeypatch.setattr(faultpoints, "_reached", {})
    record = claim(log, 1)
    assert freed == [RESERVE_KEY]
    assert AttemptLog(store).newest() == record
    assert (store.root / RESERVE_KEY).exists()  # there was room again


def test_a_disk_that_stays_full_is_an_error_without_a_record(log, store, monkeypatch):
    claim(log, 0)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(store, "write", full)
    with pytest.raises(OSError, match="full"):
        claim(log, 1)
    assert log.newest().attempt == 1


def test_a_broken_disk_does_not_cost_the_reserve(log, store, monkeypatch):
    claim(log, 0)
    monkeypatch.setattr(faultpoints, "_plan", {"store.write.synced": ("eio", 1)})
    monkeypatch.setattr(faultpoints, "_reached", {})
    with pytest.raises(OSError, match="Input/output"):
        claim(log, 1)
    assert (store.root / RESERVE_KEY).exists()
    assert log.newest().attempt == 1


CLAIMER = """
import sys
from datetime import UTC, datetime
from pathlib import Path
from surefoot.checkpoint.attempts import AttemptLog, Source, StartsFrom
from surefoot.checkpoint.store import LocalStore
from surefoot.errors import AttemptTaken

root, host, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
log = AttemptLog(LocalStore(root))
seed = StartsFrom(attempt=0, step=0, source=Source.SEED)
print("ready", flush=True)
sys.stdin.readline()
for after in range(last):
    try:
        now = datetime.now(UTC)
        log.claim(after=after, starts_from=seed, cause="race", world_size=1, host=host, started_at=now)
        print(after + 1)
    except AttemptTaken:
        pass
"""


def test_of_several_processes_exactly_one_claims_each_number(store):
    last = 30
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CLAIMER, str(store.root), f"host{i}", str(last)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(3)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    winners = {}
    for i, process in enumerate(processes):
        output, _ = process.communicate(timeout=50)
        assert process.returncode == 0
        for number in output.split():
            assert int(number) not in winners, "two processes believe that they won"
            winners[int(number)] = f"host{i}"
    records = AttemptLog(store).read_all()
    assert {number: record.host for number, record in records.items()} == winners
    assert sorted(winners) == list(range(1, last + 1))
    assert not list(store.root.rglob(".tmp-*"))


def test_the_learning_rate_factor_holds_then_returns_on_a_line(log):
    record = claim(log, 0, lr_factor=0.5, lr_hold_steps=3, lr_rewarm_steps=4, lr_from_step=100)
    factors = [record.lr_factor_at(step) for step in (50, 101, 103, 104, 105, 106, 107, 108, 5000)]
    assert factors == [0.5, 0.5, 0.5, 0.625, 0.75, 0.875, 1.0, 1.0, 1.0]
    assert claim(log, 1, lr_factor=0.3, lr_from_step=5).lr_factor_at(10**9) == 0.3
    assert claim(log, 2, lr_factor=0.3, lr_hold_steps=2).lr_factor_at(3) == 1.0


def test_records_of_before_commands_are_still_read(log, store):
    record = claim(log, 0)
    path = store.root / "attempts/000001.json"
    data = json.loads(path.read_text())
    for name in ("lr_hold_steps", "lr_rewarm_steps", "lr_from_step", "command"):
        del data[name]
    path.write_text(json.dumps(data))
    assert AttemptLog(store).read_all() == {1: record}
