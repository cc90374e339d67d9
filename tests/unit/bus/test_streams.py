from __future__ import annotations

import pytest

from surefoot.bus.streams import EVENTS, REQUESTS, STREAMS, commands_stream, logs_stream, stream_of


@pytest.mark.parametrize("name", [EVENTS, REQUESTS, commands_stream("a"), logs_stream("a"), EVENTS + ":dead"])
def test_every_stream_has_a_row(name: str) -> None:
    assert stream_of(name) in STREAMS


def test_rows_are_told_apart() -> None:
    assert stream_of(commands_stream("a")).name == "surefoot:commands:<job>"
    assert stream_of(commands_stream("a") + ":dead").name == "<stream>:dead"


@pytest.mark.parametrize("name", ["", "surefoot", "surefoot:events2", "celery"])
def test_an_undeclared_stream_is_an_error(name: str) -> None:
    with pytest.raises(KeyError):
        stream_of(name)
