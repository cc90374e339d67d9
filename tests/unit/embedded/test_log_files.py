"""Logs of services: JSON lines, bounded, whatever is written to them."""

from __future__ import annotations

import json
from pathlib import Path

from surefoot.embedded.log_files import LONGEST_LINE_BYTES, LogFile, tail


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_is_kept_and_text_is_wrapped(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    log = LogFile(path, "x")
    log.feed(b'{"ts": "t", "event": "one"}\nplain te')
    log.feed(b"xt \xff\n\n")
    log.feed(b"the last words")
    log.close()
    one, two, three = lines(path)
    assert one == {"ts": "t", "event": "one"}
    assert (two["service"], two["level"], two["event"]) == ("x", "info", "plain text \ufffd")
    assert three["event"] == "the last words"


def test_is_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    log = LogFile(path, "x", max_bytes=1000)
    for number in range(100):
        log.feed(b'{"event": "%03d"}\n' % number)
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["x.log", "x.log.1"]
    assert all(file.stat().st_size <= 1000 for file in files)
    assert lines(path)[-1] == {"event": "099"}
    assert len(lines(files[0])) + len(lines(files[1])) > 50


def test_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for text in (b"one\n", b"two\n"):
        log = LogFile(tmp_path / "x.log", "x")
        log.feed(text)
        log.close()
    assert [line["event"] for line in lines(tmp_path / "x.log")] == ["one", "two"]


def test_a_line_without_end_takes_no_memory(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "x.log", "x")
    for _ in range(10):
        log.feed(b"x" * LONGEST_LINE_BYTES)
    assert len(log._begun) <= LONGEST_LINE_BYTES
    log.close()


def test_tail_is_for_people(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    assert tail(path, 3) == []
    path.write_text('{"ts": "10:00", "level": "error", "event": "no", "error": "because"}\nplain\n[1]\n')
    assert tail(path, 3) == ["10:00 error no because", "plain", "[1]"]
    assert tail(path, 1) == ["[1]"]
