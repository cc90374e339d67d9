"""What the worker keeps in files may hold anything: it begins anew, says so once, and never fails by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog

from helpers.fake_launcher import step_event
from helpers.waiting import wait_until
from surefoot.bus.base import Outgoing
from surefoot.bus.streams import EVENTS, commands_stream
from surefoot.events import JsonlSink, RollBack
from surefoot.spec import JobSpec, parse_spec
from surefoot.testing.bus import MemoryBus
from surefoot_worker.service import commands
from surefoot_worker.service.commands import CommandCourier
from surefoot_worker.service.pump import Feed
from surefoot_worker.service.state_files import Delivered, Forwarded, read_state, write_state

WRONG = [
    b"", b"[1", b"null", b"[]", b'"x"', b"7", b"[" * 100_000, b"\xff\xfe", b"NaN",
    b'{"events": null}', b'{"events": ["x", 1]}', b'{"events": ["x", 1, 2, 3]}', b'{"events": ["x", -1, 0]}',
    b'{"events": ["x", 1.5, 0]}', b'{"events": ["x", "1", 0]}', b'{"events": ["x", true, 0]}',
    b'{"events": ["x", 1e400, 0]}', b'{"events": ["x", 1' + b"0" * 30 + b', 0]}', b'{"events": {}}',
    b'{"output": []}', b'{"output": {"rank-00000.out": 1}}', b'{"output": {"rank-00000.out": [1]}}',
    b'{"output": {"rank-00000.out": [-1, 0]}}', b'{"output": {"rank-00000.out": null}}',
]  # fmt: skip
WRONG_IDS = [
    '"garbage"', '""', '"1-"', '"-1"', '"1-2-3"', '"1-1\\n"', '"٣"', '" 1"', "1", "null", "[]", '"' + "9" * 21 + '"',
]  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_BLOCK_SECONDS", 0.02)


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    paths = {name: str(tmp_path / name) for name in ("storage", "run_dir")}
    found = parse_spec({"job": "j", "entrypoint": "x.py", "checkpoint": {"staging_dir": str(tmp_path)}, **paths})
    found.job_run_dir.mkdir(parents=True)
    return found


@pytest.mark.parametrize("data", WRONG, ids=lambda data: repr(data[:40]))
def test_what_cannot_be_used_is_as_if_it_were_not_there(spec: JobSpec, data: bytes) -> None:
    path = spec.job_run_dir / "forwarded.json"
    path.write_bytes(data)
    with structlog.testing.capture_logs() as logs:
        assert read_state(path, Forwarded) == Forwarded()
    assert [entry["log_level"] for entry in logs] == ["warning"]
    bus = MemoryBus()
    feed = Feed(spec, bus, 100.0)
    sink = JsonlSink(spec.events_path)
    sink.emit(step_event("j", 1, 1))
    sink.close()
    feed.turn(1.0)
    assert [delivery.sequence for delivery in bus.read(EVENTS, "0", 10, 0.0)] == [1]
    feed.save(2.0, at_once=True)
    assert read_state(path, Forwarded).events[2] == 1


def test_none_is_no_reason_to_warn_and_what_is_written_is_read(tmp_path: Path) -> None:
    path, state = tmp_path / "f.json", Forwarded(events=("x", 7, 1), output={"rank-00000.out": (3, 1)})
    with structlog.testing.capture_logs() as logs:
        assert read_state(path, Forwarded) == Forwarded()
        write_state(path, state)
        assert read_state(path, Forwarded) == state
        path.write_text('{"events": ["x", 7, 1], "output": {"rank-00000.out": [3, 1]}, "of a later version": 1}')
        assert read_state(path, Forwarded) == state
    assert logs == []


def test_a_place_that_the_file_does_not_have_is_its_beginning(spec: JobSpec) -> None:
    sink, bus = JsonlSink(spec.events_path), MemoryBus()
    sink.emit(step_event("j", 1, 1))
    sink.close()
    first = Feed(spec, bus, 100.0)
    first.turn(1.0)
    path = spec.job_run_dir / "forwarded.json"
    name, offset, line = read_state(path, Forwarded).events
    for place in ((offset + 1, line), (10**15, line), (offset, offset + 1)):
        write_state(path, Forwarded(events=(name, *place), output={"rank-00000.out": (10**15, 5)}))
        again = MemoryBus()
        Feed(spec, again, 100.0).turn(1.0)
        assert [delivery.sequence for delivery in again.read(EVENTS, "0", 10, 0.0)] == [1], place


def rollback(number: int) -> RollBack:
    return RollBack(job="j", attempt=1, number=number, reason="", to_attempt=1, to_step=1, lr_factor=1.0)


@pytest.mark.parametrize(
    "content",
    [*WRONG_IDS, '"99999999999999-0"', '"18446744073709551616"', '"99999999999999999999-99999999999999999999"'],
)
def test_a_command_arrives_whatever_counts_as_delivered(spec: JobSpec, tmp_path: Path, content: str) -> None:
    bus, staging = MemoryBus(), tmp_path / "staging"
    staging.mkdir()
    bus.publish(commands_stream("j"), [Outgoing(rollback(1), "recovery:x", 1)])
    (spec.job_run_dir / "delivered.json").write_text(f'{{"after": {content}}}')
    courier = CommandCourier(spec, staging, bus, lambda: 1)
    try:
        wait_until(lambda: list(staging.glob("commands/*.json")), 5, "the command is in the folder")
    finally:
        courier.close()
        courier.join()
    last = bus.read(commands_stream("j"), "0", 10, 0.0)[-1].id
    assert read_state(spec.job_run_dir / "delivered.json", Delivered).after == last, "the thread has ended"


def test_what_was_delivered_is_not_delivered_again(spec: JobSpec, tmp_path: Path) -> None:
    bus, staging = MemoryBus(), tmp_path / "staging"
    staging.mkdir()
    bus.publish(commands_stream("j"), [Outgoing(rollback(number), "recovery:x", number) for number in (1, 2)])
    ids: list[Any] = [delivery.id for delivery in bus.read(commands_stream("j"), "0", 10, 0.0)]
    write_state(spec.job_run_dir / "delivered.json", Delivered(after=ids[0]))
    courier = CommandCourier(spec, staging, bus, lambda: 1)
    try:
        state = spec.job_run_dir / "delivered.json"
        wait_until(lambda: read_state(state, Delivered).after == ids[1], 5, "the second is delivered")
    finally:
        courier.close()
        courier.join()
    assert len(list((staging / "commands").glob("*.json"))) == 1
