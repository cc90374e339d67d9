"""Events on files: every type survives the trip, and readers can follow a file that is being written."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from surefoot.events import EVENT_TYPES, JobFinished, JobState, JsonlSink, StepCompleted, decode_message, read_events
from surefoot.events.registry import encode_message


def step(number: int, loss: float = 1.0) -> StepCompleted:
    return StepCompleted(
        job="j", step=number, updates=number, epoch=0, loss=loss, learning_rate=0.1, applied=True, num_samples=8,
        step_seconds=(0.1, 0.2),
    )  # fmt: skip


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_survive(value: float) -> None:
    decoded = decode_message(encode_message(step(1, loss=value)))
    assert isinstance(decoded, StepCompleted)
    assert decoded.loss == value or (math.isnan(value) and math.isnan(decoded.loss))


def test_unknown_type_is_none_and_invalid_is_an_error() -> None:
    assert decode_message('{"type": "FromTheFuture", "job": "j"}') is None
    for line in ('{"type": "StepCompleted", "job": "j"}', "[]", "{}", "not json"):
        with pytest.raises(ValueError):  # noqa: PT011  pydantic's and json's own messages
            decode_message(line)


def test_unknown_fields_of_a_newer_version_are_ignored() -> None:
    line = encode_message(step(3)).replace('"job"', '"colour":"red","job"', 1)
    decoded = decode_message(line)
    assert isinstance(decoded, StepCompleted)
    assert decoded.step == 3


def test_reader_leaves_a_line_that_is_not_complete(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "events.jsonl"
    assert read_events(path) == ([], 0)
    sink = JsonlSink(path)
    sink.emit(step(1))
    with path.open("ab") as file:
        file.write(encode_message(step(2)).encode()[:20])
    events, offset = read_events(path)
    assert [event.step for event in events if isinstance(event, StepCompleted)] == [1]
    with path.open("ab") as file:
        file.write(encode_message(step(2)).encode()[20:] + b"\nrubbish\n")
    sink.emit(JobFinished(job="j", state=JobState.SUCCEEDED, reason="done", restarts=0))
    sink.close()
    events, offset = read_events(path, offset)
    assert [event.type for event in events] == ["StepCompleted", "JobFinished"]
    assert read_events(path, offset) == ([], offset)


def test_names_are_the_class_names() -> None:
    assert {name: cls.__name__ for name, cls in EVENT_TYPES.items()} == {name: name for name in EVENT_TYPES}
