from __future__ import annotations

import threading

import pytest

from helpers.gateway import attempt_started, golden, parse_metrics, step
from surefoot.bus.base import Outgoing
from surefoot.bus.streams import EVENTS
from surefoot.errors import BusUnavailable
from surefoot.events import AnomalyDetected, Message, SaveRequested
from surefoot.testing.bus import MemoryBus
from surefoot_gateway import reader as reader_module
from surefoot_gateway.board import Board
from surefoot_gateway.handlers import HANDLERS
from surefoot_gateway.reader import StreamReader

SOURCE = "job:demo:1"


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus()


@pytest.fixture
def board() -> Board:
    return Board(max_jobs=10)


@pytest.fixture
def reader(bus: MemoryBus, board: Board, monkeypatch: pytest.MonkeyPatch) -> StreamReader:
    monkeypatch.setattr(reader_module, "GATHER_SECONDS", 0.0)
    monkeypatch.setattr(reader_module, "BLOCK_SECONDS", 0.001)
    return StreamReader(bus, board, HANDLERS, threading.Event())


def send(bus: MemoryBus, *messages: Message, source: str = SOURCE, first: int = 1) -> None:
    bus.publish(EVENTS, [Outgoing(message, source, n) for n, message in enumerate(messages, first)])


def value(board: Board, name: str, **labels: str) -> float:
    return parse_metrics(board.render_metrics("")[0].decode())[name, tuple(sorted(labels.items()))]


def num_steps(board: Board) -> float:
    return value(board, "surefoot_steps_total", job_id="demo", outcome="applied")


def test_what_comes_twice_counts_once_and_a_gap_is_counted(bus, board, reader) -> None:
    send(bus, step(1), step(2))
    send(bus, step(1), step(2), step(3))
    send(bus, step(7), first=7)
    reader.turn()
    assert num_steps(board) == 4
    assert value(board, "surefoot_messages_ignored_total", outcome="repeated") == 2
    assert value(board, "surefoot_messages_lost_total", service="job") == 3
    assert value(board, "surefoot_messages_total", service="job") == 4


def test_a_stream_that_begins_in_the_middle_has_lost_nothing(bus, board, reader) -> None:
    send(bus, step(501), first=501)
    reader.turn()
    assert value(board, "surefoot_messages_lost_total", service="job") == 0


def test_the_same_fact_from_the_next_process_of_a_service_counts_once(bus, board, reader) -> None:
    anomaly = golden(AnomalyDetected, job="demo", kind="spike", severity="critical")
    send(bus, anomaly, source="detector:a")
    send(bus, anomaly, source="detector:b")
    reader.turn()
    labels = {"job_id": "demo", "kind": "spike", "severity": "critical"}
    assert value(board, "surefoot_anomalies_total", **labels) == 1
    assert value(board, "surefoot_messages_total", service="detector") == 2


def test_unknown_and_broken_messages_are_counted_and_leave_no_gap(bus, board, reader) -> None:
    send(bus, step(1))
    bus.append(EVENTS, {b"m": b'{"type":"MoonLanded"}', b"s": SOURCE.encode(), b"n": b"2"})
    bus.append(EVENTS, {b"m": b'{"type":"StepCompleted"}', b"s": SOURCE.encode(), b"n": b"3"})
    bus.append(EVENTS, {b"garbage": b""})
    send(bus, step(4), first=4)
    reader.turn()
    assert num_steps(board) == 2
    assert value(board, "surefoot_messages_ignored_total", outcome="unknown") == 1
    assert value(board, "surefoot_messages_ignored_total", outcome="invalid") == 2
    assert value(board, "surefoot_messages_lost_total", service="job") == 0


def test_a_message_that_cannot_be_counted_does_not_stop_the_others(bus, board, caplog) -> None:
    def broken(job, message) -> None:
        raise ZeroDivisionError

    reader = StreamReader(bus, board, {**HANDLERS, AnomalyDetected: broken}, threading.Event())
    send(bus, golden(AnomalyDetected, job="demo"), step(1))
    reader.turn()
    assert num_steps(board) == 1
    assert value(board, "surefoot_messages_ignored_total", outcome="failed") == 1


def test_series_of_jobs_wait_until_the_whole_stream_was_read(bus, board, reader, monkeypatch) -> None:
    monkeypatch.setattr(reader_module, "BATCH_MESSAGES", 10)
    send(bus, *(step(n) for n in range(1, 26)))
    for _ in range(2):
        reader.turn()
        assert value(board, "surefoot_gateway_caught_up") == 0
        assert b"job_id" not in board.render_metrics("")[0]
    reader.turn()
    assert value(board, "surefoot_gateway_caught_up") == 1
    assert num_steps(board) == 25


def test_an_outage_is_told_and_costs_nothing(bus, board, reader) -> None:
    send(bus, step(1))
    reader.turn()
    bus.available = False
    with pytest.raises(BusUnavailable):
        reader.turn()
    assert (value(board, "surefoot_gateway_bus_up"), num_steps(board)) == (0, 1)
    bus.available = True
    send(bus, step(2), first=2)
    reader.turn()
    assert (value(board, "surefoot_gateway_bus_up"), num_steps(board)) == (1, 2)


def test_a_message_without_handler_still_puts_its_job_on_the_page(bus, board, reader) -> None:
    send(bus, SaveRequested(job="new", operation_id="x", actor="me"), source="api:1")
    reader.turn()
    assert list(board.jobs) == ["new"]


def test_a_job_that_begins_anew_is_drawn_anew(bus, board, reader) -> None:
    send(bus, attempt_started(1), step(1), attempt_started(2, from_attempt=1, from_step=1), step(2, attempt=2))
    send(bus, attempt_started(1), step(1), source="job:demo:2")
    reader.turn()
    view = board.jobs["demo"].view
    assert (len(view.curve), list(view.attempts)) == (1, [1])
    assert num_steps(board) == 3
