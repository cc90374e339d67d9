"""Logs and events are best effort: /dev/full refuses every write with ENOSPC."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from surefoot.errors import EXIT_FAILED, EXIT_PREEMPTED
from surefoot.events import Event, JobState
from surefoot_worker.launcher.ending import Ending
from surefoot_worker.launcher.output import LossyLogFile, lossy_text, open_for_append
from surefoot_worker.launcher.reporting import Reports


def test_a_full_disk_drops_output_and_raises_nothing() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    stream = lossy_text(fd, "<stdout>")
    print("12345", file=stream)
    print("x" * 100_000, file=stream, flush=True)
    assert stream.buffer.raw.num_dropped_bytes == 6 + 100_001  # type: ignore[attr-defined]
    assert stream.fileno() == fd
    stream.close()
    os.close(fd)  # it was left open


def test_what_was_lost_is_said_when_there_is_room_again(tmp_path: Path) -> None:
    full, file = os.open("/dev/full", os.O_WRONLY), os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    target = os.dup(full)
    stream = lossy_text(target, "<stdout>")
    print("lost", file=stream)
    os.dup2(file, target)
    print("kept \u20ac", file=stream)
    assert (tmp_path / "out").read_text() == "--- surefoot: 5 bytes of output were lost ---\nkept \u20ac\n"
    for fd in (full, file, target):
        os.close(fd)


def test_where_the_file_cannot_be_opened_output_goes_nowhere(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fd = open_for_append(tmp_path / "file" / "not-a-folder.out")
    assert Path(f"/proc/self/fd/{fd}").readlink() == Path(os.devnull)
    os.close(fd)


def test_a_log_file_that_cannot_be_written_is_quiet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for path in (Path("/dev/full"), tmp_path / "file" / "launcher.log"):
        handler = LossyLogFile(path)
        handler.handle(logging.LogRecord("x", logging.ERROR, __file__, 1, "text", None, None))
        handler.close()
        handler.close()
    assert capsys.readouterr() == ("", "")
    handler = LossyLogFile(tmp_path / "new" / "launcher.log")
    handler.handle(logging.LogRecord("x", logging.ERROR, __file__, 1, "text", None, None))
    handler.close()
    assert (tmp_path / "new" / "launcher.log").read_text().endswith(" ERROR text\n")


def test_events_that_cannot_be_written_are_counted_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        def emit(self, event: Event) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    reports = Reports("j", Full())
    for _ in range(3):
        reports.job_finished(JobState.SUCCEEDED, "", 0)
    assert reports.num_lost == 3
    assert len(caplog.records) == 1


def test_a_job_whose_last_snapshot_is_not_durable_has_failed() -> None:
    stopped = Ending(JobState.STOPPED, "stopped on request", EXIT_PREEMPTED, 1, 1)
    spoiled = stopped.without_last_snapshot(Path("/dev/shm/x"))
    assert (spoiled.state, spoiled.exit_code) == (JobState.FAILED, EXIT_FAILED)
    assert spoiled.reason == "stopped on request; the last snapshot is not durable, it stays in /dev/shm/x"
    failed = Ending(JobState.FAILED, "boom\nTraceback", 2, 1, 0).without_last_snapshot(Path("/x"))
    assert failed.exit_code == 2
    assert failed.reason == "boom; the last snapshot is not durable, it stays in /x\nTraceback"
