from __future__ import annotations

from pathlib import Path

import pytest

from surefoot_writer.cleared import Cleared, ClearedSteps


def test_a_restart_forgets_nothing(tmp_path: Path) -> None:
    first = ClearedSteps(tmp_path / "cleared")
    assert first.newest("demo") is None
    assert first.note("demo", Cleared(1, 100))
    assert first.note("a.b", Cleared(3, 7))

    second = ClearedSteps(tmp_path / "cleared")
    assert (second.newest("demo"), second.newest("a.b")) == (Cleared(1, 100), Cleared(3, 7))


def test_only_newer_ones_count(tmp_path: Path) -> None:
    cleared = ClearedSteps(tmp_path)
    cleared.note("demo", Cleared(2, 100))
    assert not cleared.note("demo", Cleared(2, 100))
    assert not cleared.note("demo", Cleared(1, 900))
    assert cleared.note("demo", Cleared(3, 50))  # a new attempt begins at an earlier step
    assert cleared.newest("demo") == Cleared(3, 50)


@pytest.mark.parametrize(
    "content",
    [
        "[1,", "[1]", "[]", "null", "{}", '"ab"', '["a", 1]', "[1, null]", "[1, 2, 3]", "[true, 2]", "[-1, 2]",
        "[1, -2]", "[1.5, 2]", '{"attempt": 1, "through_step": 2}', "[" * 100_000,
    ],
    ids=lambda content: content[:40],
)  # fmt: skip
def test_a_damaged_file_is_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "demo.json").write_text(content)
    cleared = ClearedSteps(tmp_path)
    assert cleared.newest("demo") is None
    assert cleared.note("demo", Cleared(1, 1))
    assert ClearedSteps(tmp_path).newest("demo") == Cleared(1, 1)
