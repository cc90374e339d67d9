"""The wire form of every message type. Changing a golden file breaks readers: add fields, never rename."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefoot.events import MESSAGE_TYPES, decode_message, encode_message

GOLDEN = Path(__file__).parent / "golden"


def test_every_type_has_a_golden_file_and_no_file_is_orphaned() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(MESSAGE_TYPES)


@pytest.mark.parametrize("name", sorted(MESSAGE_TYPES))
def test_golden_file_decodes_and_encodes_to_itself(name: str) -> None:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    message = decode_message(json.dumps(golden))
    assert type(message) is MESSAGE_TYPES[name]
    assert json.loads(encode_message(message)) == golden


@pytest.mark.parametrize("name", sorted(MESSAGE_TYPES))
def test_golden_file_sets_every_field(name: str) -> None:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    assert set(golden) == {"type", *MESSAGE_TYPES[name].model_fields}
    assert None not in golden.values(), "an optional field shows its type only when it is set"
