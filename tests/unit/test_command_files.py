from __future__ import annotations

import os
import time

import pytest

from surefoot.command_files import CommandFolder, newest_if_too_low, too_low, write_command
from surefoot.events import RollBack, SaveCheckpoint


def save(number, job="job"):
    return SaveCheckpoint(job=job, attempt=1, number=number, reason="test")


def test_a_command_comes_back_as_it_was(tmp_path):
    command = RollBack(
        job="job", attempt=3, number=12, reason="Verlust ∞", to_attempt=2, to_step=100, lr_factor=0.5,
        skip_windows=({"start": 5, "stop": 9},),
    )  # fmt: skip
    path = write_command(tmp_path, command)
    assert path.name == "000000000012.json"
    assert CommandFolder(tmp_path, "job").next_after(0) == command


def test_lowest_number_first_and_only_above_the_given_one(tmp_path):
    folder = CommandFolder(tmp_path, "job")
    assert folder.next_after(0) is None
    for number in (9, 1_000_000_000_000, 4):
        write_command(tmp_path, save(number))
    assert [folder.next_after(n).number for n in (0, 4, 9)] == [4, 9, 1_000_000_000_000]
    assert folder.next_after(1_000_000_000_000) is None


def test_twice_the_same_is_one_file_and_nothing_else_is_left(tmp_path):
    for _ in range(2):
        write_command(tmp_path, save(3))
    assert [path.name for path in (tmp_path / "commands").iterdir()] == ["000000000003.json"]


def test_without_a_staging_folder_nothing_is_made(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_command(tmp_path / "gone", save(1))
    assert not (tmp_path / "gone").exists()


def test_one_that_comes_in_the_same_tick_of_the_clock_is_seen(tmp_path):
    """File times tick every few milliseconds: equal times do not mean an equal folder."""
    folder = CommandFolder(tmp_path, "job")
    write_command(tmp_path, save(1))
    commands = tmp_path / "commands"
    assert folder.next_after(0).number == 1
    status = commands.stat()
    write_command(tmp_path, save(2))
    os.utime(commands, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert folder.next_after(1).number == 2


def test_a_quiet_folder_is_not_read_again(tmp_path):
    folder = CommandFolder(tmp_path, "job")
    write_command(tmp_path, save(1))
    long_ago = time.time_ns() - 10_000_000_000
    os.utime(tmp_path / "commands", ns=(long_ago, long_ago))
    assert folder.next_after(0).number == 1
    (tmp_path / "commands/000000000001.json").rename(tmp_path / "commands/000000000002.json")
    os.utime(tmp_path / "commands", ns=(long_ago, long_ago))
    assert folder.next_after(1) is None


@pytest.mark.parametrize("content", ["", "[]", '{"type": "SaveCheckpoint"}', '{"type": "JobFinished", "job": "job"}'])
def test_what_is_no_command_is_passed_over(tmp_path, content):
    write_command(tmp_path, save(2))
    (tmp_path / "commands/000000000001.json").write_text(content)
    assert CommandFolder(tmp_path, "job").next_after(0).number == 2


def test_another_jobs_command_and_a_wrong_number_are_passed_over(tmp_path):
    write_command(tmp_path, save(1, job="other"))
    write_command(tmp_path, save(2)).rename(tmp_path / "commands/000000000003.json")
    assert CommandFolder(tmp_path, "job").next_after(0) is None


def test_a_new_command_with_a_low_number_is_found_once_and_not_what_was_given_out(tmp_path):
    folder = CommandFolder(tmp_path, "job")
    given = save(5)
    write_command(tmp_path, given)
    assert folder.next_after(0) == given
    assert folder.too_low(5) == []
    write_command(tmp_path, given)  # delivered again
    low, renumbered = save(3), save(5)
    write_command(tmp_path, low)
    assert folder.next_after(5) is None
    assert folder.too_low(5) == [low]
    write_command(tmp_path, renumbered)  # recovery lost its database and counts anew
    assert folder.next_after(5) is None
    assert [folder.too_low(5), folder.too_low(5)] == [[renumbered], []]


def test_a_refusal_names_the_number_to_exceed():
    assert newest_if_too_low(too_low(3, 17)) == 17
    assert newest_if_too_low("step 3 is not on the lineage") is None
