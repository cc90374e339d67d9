from __future__ import annotations

from pathlib import Path

from surefoot.small_files import write_atomically


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for text in ("older and longer", "newer"):
        write_atomically(path, text)
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]
