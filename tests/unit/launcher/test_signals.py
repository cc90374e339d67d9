from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from surefoot_worker.launcher import sweep
from surefoot_worker.launcher.ending import Patience
from surefoot_worker.launcher.signals import SignalInbox


def raised(*numbers: int) -> None:
    for number in numbers:
        signal.raise_signal(number)


def test_looking_for_a_stop_takes_nothing() -> None:
    with SignalInbox() as inbox:
        raised(signal.SIGUSR1)
        assert not inbox.is_stop_pending()  # a wish to save must not end a start
        raised(signal.SIGTERM)
        assert inbox.is_stop_pending()
        raised(signal.SIGUSR1)
        assert inbox.take() == [signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1]
        assert inbox.take() == []
        assert not inbox.is_stop_pending()


def test_storage_is_waited_for_until_the_third_signal_at_the_latest() -> None:
    reader, writer = os.pipe()
    with SignalInbox() as inbox:
        patience = Patience(inbox, 1)
        raised(signal.SIGUSR1, signal.SIGINT, signal.SIGINT)
        began = time.monotonic()
        assert not patience.wait(reader)
        assert time.monotonic() - began < 1
        os.write(writer, b"x")
        assert Patience(inbox, 2).wait(reader)
    os.close(reader)
    os.close(writer)


def test_after_a_second_signal_storage_gets_five_seconds() -> None:
    reader, writer = os.pipe()
    with SignalInbox() as inbox:
        began = time.monotonic()
        assert not Patience(inbox, 2).wait(reader)
        assert 4.9 < time.monotonic() - began < 7
    os.close(reader)
    os.close(writer)


def test_only_processes_from_before_the_moment_are_swept() -> None:
    environment = os.environ | {"SUREFOOT_JOB_KEY": f"sweep-{os.getpid()}"}

    def helper() -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "1000"], env=environment)

    with helper() as old, helper() as kept:
        began = sweep.started_ticks(kept.pid)
        while sweep.now_ticks() <= began:
            pass
        moment = sweep.now_ticks()
        with helper() as young:
            killed = sweep.kill_older(environment["SUREFOOT_JOB_KEY"], than_ticks=moment, keep={kept.pid})
            assert killed == [old.pid]
            assert old.wait(5) == -signal.SIGKILL
            assert (kept.poll(), young.poll()) == (None, None)
            young.kill()
            kept.kill()


def test_what_a_passing_process_executes_can_be_terminated() -> None:
    code = (
        "import subprocess, signal\nfrom surefoot_worker.launcher.signals import let_pass\nlet_pass()\n"
        "for number in (1, 2, 10, 15): signal.raise_signal(number)\n"
        "with subprocess.Popen(['sleep', '1000']) as child:\n    child.terminate()\n    print(child.wait(5))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "-15\n"
