from __future__ import annotations

from pathlib import Path

import pytest

from helpers.fake_launcher import step_event
from surefoot.bus.streams import EVENTS
from surefoot.errors import BusUnavailable
from surefoot.events import JsonlSink
from surefoot.testing.bus import MemoryBus
from surefoot_worker.service.forwarder import EventForwarder
from surefoot_worker.service.lines import LineTail
from surefoot_worker.service.states import TRANSITIONS


def append(path: Path, *steps: int) -> None:
    sink = JsonlSink(path)
    for step in steps:
        sink.emit(step_event("j", 1, step))
    sink.close()


def sent(bus: MemoryBus) -> list[tuple[str, int]]:
    return [(d.source, d.sequence) for d in bus.read(EVENTS, "0", 1000, 0)]


def test_lines_are_numbered_and_a_bad_one_is_a_gap(tmp_path: Path) -> None:
    path, bus = tmp_path / "events.jsonl", MemoryBus()
    forwarder = EventForwarder("j", path, bus)
    assert not forwarder.forward()
    append(path, 1, 2)
    with path.open("a") as file:
        file.write('{"type":"StepComp\n')
    append(path, 3)
    assert forwarder.forward()
    assert [number for _, number in sent(bus)] == [1, 2, 4]
    again = EventForwarder("j", path, bus, forwarder.position)
    append(path, 4)
    assert again.forward()
    assert [number for _, number in sent(bus)] == [1, 2, 4, 5]
    assert len({source for source, _ in sent(bus)}) == 1


def test_without_its_position_the_same_lines_have_the_same_numbers(tmp_path: Path) -> None:
    path, bus = tmp_path / "events.jsonl", MemoryBus()
    append(path, 1, 2)
    EventForwarder("j", path, bus).forward()
    EventForwarder("j", path, bus).forward()
    assert sent(bus)[:2] == sent(bus)[2:]


def test_a_new_file_is_a_new_source(tmp_path: Path) -> None:
    path, bus = tmp_path / "events.jsonl", MemoryBus()
    append(path, 1, 2, 3)
    forwarder = EventForwarder("j", path, bus)
    forwarder.forward()
    path.unlink()
    append(path, 1)
    assert forwarder.forward()
    append(path, 2, 3, 4)
    later = EventForwarder("j", path, bus, ("of another file", 300, 2))
    assert later.forward()
    (first, *_), (new, number) = sent(bus)[0], sent(bus)[3]
    assert new != first
    assert number == 1
    assert sent(bus)[4:] == [(new, n) for n in (1, 2, 3, 4)]


def test_an_outage_loses_nothing(tmp_path: Path) -> None:
    path, bus = tmp_path / "events.jsonl", MemoryBus()
    append(path, 1, 2)
    forwarder = EventForwarder("j", path, bus)
    bus.available = False
    with pytest.raises(BusUnavailable):
        forwarder.forward()
    assert forwarder.position[1:] == (0, 0)
    append(path, 3)
    bus.available = True
    while forwarder.forward():
        pass
    assert [number for _, number in sent(bus)] == [1, 2, 3]


def test_tail_leaves_half_a_line_until_nobody_writes(tmp_path: Path) -> None:
    path = tmp_path / "out"
    tail = LineTail(path)
    path.write_bytes(b"one\ntw")
    assert tail.read() == [b"one"]
    assert tail.read() == []
    assert tail.rest() == [b"tw"]
    assert tail.rest() == []
    assert LineTail(path).rest() == [b"one", b"tw"]
    path.write_bytes(b"new\n")
    assert tail.read() == [b"new"]


def test_every_state_is_in_the_table() -> None:
    assert all(after in TRANSITIONS for follows in TRANSITIONS.values() for after in follows)
