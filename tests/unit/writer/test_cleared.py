from __future__ import annotations

from pathlib import Path

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


def test_a_damaged_file_is_as_none(tmp_path: Path) -> None:
    (tmp_path / "demo.json").write_text("[1,")
    (tmp_path / "other.json").write_text("[1]")
    cleared = ClearedSteps(tmp_path)
    assert cleared.newest("demo") is None
    assert cleared.newest("other") is None
