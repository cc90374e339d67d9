"""The wire form of every event type. Changing a golden file breaks readers of old events: add fields, never rename."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefoot.events import EVENT_TYPES, decode_event
from surefoot.events.registry import encode_event

GOLDEN = Path(__file__).parent / "golden"


def test_every_type_has_a_golden_file_and_no_file_is_orphaned() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(EVENT_TYPES)


@pytest.mark.parametrize("name", sorted(EVENT_TYPES))
def test_golden_file_decodes_and_encodes_to_itself(name: str) -> None:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    event = decode_event(json.dumps(golden))
    assert type(event) is EVENT_TYPES[name]
    assert json.loads(encode_event(event)) == golden


@pytest.mark.parametrize("name", sorted(EVENT_TYPES))
def test_golden_file_sets_every_field(name: str) -> None:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    assert set(golden) == {"type", *EVENT_TYPES[name].model_fields}
    assert None not in golden.values(), "an optional field shows its type only when it is set"
