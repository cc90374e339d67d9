"""What a service may rely on while it is built and what it depends on is away."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.errors import BusUnavailable, SurefootError
from surefoot.runtime import Runtime, StopEvent, Turn, run_service
from surefoot.settings import CommonSettings
from surefoot.telemetry import logging as logs


@pytest.fixture(autouse=True)
def process_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "configure", lambda name, level: None)
    monkeypatch.setattr("surefoot.runtime._stop_on_signals", lambda stopping: None)


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Callable[[Runtime], Turn]], int]:
    return lambda build: run_service("case", CommonSettings(home=tmp_path), build)


def test_what_a_failed_build_made_is_closed_before_the_next(run: Callable[[Callable[[Runtime], Turn]], int]) -> None:
    order: list[str] = []

    def build(runtime: Runtime) -> Turn:
        number = order.count("close") + 1
        order.append("open")
        runtime.on_exit.callback(order.append, "close")
        if number < 3:
            raise BusUnavailable("away")
        return runtime.stopping.set

    assert run(build) == 0
    assert order == ["open", "close"] * 3


def test_an_outage_later_closes_nothing(run: Callable[[Callable[[Runtime], Turn]], int]) -> None:
    order: list[str] = []

    def build(runtime: Runtime) -> Turn:
        runtime.on_exit.callback(order.append, "close")

        def turn() -> None:
            order.append("turn")
            if len(order) < 2:
                raise BusUnavailable("away")
            runtime.stopping.set()

        return turn

    assert run(build) == 0
    assert order == ["turn", "turn", "close"]


def test_an_error_ends_the_service_with_its_exit_code(run: Callable[[Callable[[Runtime], Turn]], int]) -> None:
    def build(runtime: Runtime) -> Turn:
        raise SurefootError("no use")

    assert run(build) == SurefootError.exit_code


def test_a_signal_in_the_middle_of_a_wait_sets_the_event_and_blocks_nobody() -> None:
    """With threading.Event one of some thousand such signals finds the thread holding the lock that `set` needs."""
    event = StopEvent()
    before = signal.signal(signal.SIGALRM, lambda *_: event.set())
    try:
        for _ in range(2000):
            event = StopEvent()
            signal.setitimer(signal.ITIMER_REAL, 0.0002)
            while not event.wait(0.00001):
                pass
            event.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_all_who_wait_wake_up() -> None:
    event = StopEvent()
    assert not event.wait(0.01)
    threads = [threading.Thread(target=event.wait, args=(20,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    event.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert event.wait(0)
    event.close()
