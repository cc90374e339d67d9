"""The supervisor over stand-ins: order, readiness, restarts, stopping, and that nothing is left."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.server import free_port
from helpers.stacks import is_alive, kill_stack, log_of, make_plan, processes_of, shell, stand_in, story
from helpers.waiting import wait_until
from surefoot.embedded import stack as stacks
from surefoot.embedded.plan import SERVICES, Plan, Readiness, Service, read_plan
from surefoot.embedded.server import answers_ping, server_arguments, server_command
from surefoot.embedded.stack import StackFailed
from surefoot.embedded.stack_file import (
    ServiceState,
    ServiceStatus,
    Stack,
    StackState,
    read_stack,
    running_stack,
    supervisor_pid,
)
from surefoot.embedded.status import report
from surefoot.embedded.supervisor import stop_order


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "home"
    yield folder
    kill_stack(folder)


def the_stack(home: Path) -> Stack:
    stack = running_stack(home)
    assert stack is not None
    return stack


def test_starts_in_order_and_stops_in_reverse(home: Path) -> None:
    plan = make_plan(
        home, stand_in("base"), stand_in("one", "slow-to-stop", after=("base",)), stand_in("top", after=("one",))
    )
    stack = stacks.start(plan)
    assert stack.state is StackState.RUNNING
    assert [service.state for service in stack.services.values()] == [ServiceState.READY] * 3
    assert story(home) == ["base start", "one start", "top start"]
    assert report(home).healthy
    ended = stacks.stop(home)
    assert ended is not None
    assert (ended.state, ended.failed, ended.detail) == (StackState.STOPPED, [], "")
    assert story(home)[3:] == ["top stop", "one stop", "base stop"]
    assert processes_of(home) == []
    assert supervisor_pid(home) is None
    assert stacks.stop(home) is None


def test_the_supervisor_is_in_a_session_of_its_own(home: Path) -> None:
    stack = stacks.start(make_plan(home, shell("one")))
    assert os.getsid(stack.pid) == stack.pid
    assert os.getsid(stack.services["one"].pid) == stack.services["one"].pid


def test_a_chore_and_a_server_are_gates(home: Path) -> None:
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    chore = "import pathlib, os; pathlib.Path(os.environ['SUREFOOT_HOME'], 'story.txt').write_text('chore done\\n')"
    (home / "db").mkdir(parents=True)
    plan = make_plan(
        home,
        Service("server", (*server_command(), *server_arguments(port, home / "db")), Readiness.ANSWERS, url=url),
        Service("database", (sys.executable, "-c", chore), Readiness.ENDED),
        stand_in("one", after=("server", "database")),
        shell("alive", after=("one",)),
    )
    stack = stacks.start(plan)
    assert stack.services["database"].state is ServiceState.DONE
    assert story(home) == ["chore done", "one start", "alive start"]
    assert answers_ping(url)
    assert [service.name for service in report(home).services] == ["server", "one", "alive"]
    assert "Ready to accept connections" in log_of(home, "server")


def test_what_ends_is_started_again(home: Path) -> None:
    before = stacks.start(make_plan(home, shell("one"), shell("two"))).services
    os.kill(before["one"].pid, signal.SIGKILL)

    def is_back() -> bool:
        one = the_stack(home).services["one"]
        return one.restarts == 1 and one.state is ServiceState.READY

    wait_until(is_back, 20, "the service is back")
    after = the_stack(home).services
    assert after["one"].pid != before["one"].pid
    assert after["one"].detail == "ended by SIGKILL"
    assert (after["two"].pid, after["two"].restarts) == (before["two"].pid, 0)


def test_one_that_ends_again_and_again_is_started_ever_later(home: Path) -> None:
    flag = home / "broken"
    stack = stacks.start(make_plan(home, shell("one", f"test ! -e {flag} && exec sleep 1000"), shell("two")))
    flag.touch()
    os.kill(stack.services["one"].pid, signal.SIGKILL)
    ended: list[float] = []
    for number in range(1, 5):
        row = wait_until(lambda n=number: _backing_off(home, n), 20, f"end number {number}")
        ended.append(row.since_seconds)
    delays = [later - earlier for earlier, later in itertools.pairwise(ended)]
    assert delays[0] >= 0.1
    assert delays[1] >= 0.2
    assert delays[2] >= 0.4
    flag.unlink()
    wait_until(lambda: the_stack(home).services["one"].state is ServiceState.READY, 20, "it is ready again")
    assert the_stack(home).services["two"].pid == stack.services["two"].pid


def _backing_off(home: Path, restarts: int) -> ServiceStatus | None:
    row = the_stack(home).services["one"]
    return row if row.state is ServiceState.BACKING_OFF and row.restarts == restarts else None


def test_nothing_survives_the_supervisor(home: Path) -> None:
    stack = stacks.start(make_plan(home, stand_in("one"), shell("two", "trap '' TERM HUP; exec sleep 1000")))
    os.kill(stack.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(stack.services["one"].pid), 10, "the service is gone")
    wait_until(lambda: not is_alive(stack.services["two"].pid), 10, "the deaf one too")
    assert running_stack(home) is None
    # Health files and the stack file of the dead fool nobody.
    again = stacks.start(make_plan(home, stand_in("one")))
    assert again.pid != stack.pid


@pytest.mark.parametrize(("code", "num_starts"), [(3, 3), (2, 1)])
def test_a_service_that_cannot_start_stops_the_stack(home: Path, code: int, num_starts: int) -> None:
    bad = shell("two", f"echo because of the weather >&2; exit {code}", ready=Readiness.HEALTH)
    with pytest.raises(StackFailed, match=f"two ended with exit code {code}"):
        stacks.start(make_plan(home, shell("one"), bad, shell("three", after=("two",))))
    assert story(home).count("two start") == num_starts
    assert "three start" not in story(home)
    assert processes_of(home) == []
    assert "because of the weather" in log_of(home, "two")
    stack = read_stack(home)
    assert stack is not None
    assert (stack.state, stack.failed) == (StackState.FAILED, ["two"])


def test_a_service_that_is_never_ready_stops_the_stack(home: Path) -> None:
    mute = shell("two", ready=Readiness.HEALTH)
    with pytest.raises(StackFailed, match="two is not ready after"):
        stacks.start(make_plan(home, shell("one"), mute, start_seconds=0.5))
    assert processes_of(home) == []


def test_a_program_that_is_not_there(home: Path) -> None:
    with pytest.raises(StackFailed, match="one ended with exit code 127"):
        stacks.start(make_plan(home, Service("one", ("/no/such/program",))))
    assert "cannot be started" in log_of(home, "one")


def test_those_that_end_badly_are_named(home: Path) -> None:
    deaf = shell("two", "trap '' TERM; while :; do sleep 0.1; done", after=("one",), stop_seconds=0.3)
    unclean = shell("three", "trap 'exit 1' TERM; while :; do sleep 0.1; done")
    stacks.start(make_plan(home, shell("one"), deaf, unclean))
    ended = stacks.stop(home)
    assert ended is not None
    assert ended.failed == ["three", "two"]
    assert ended.detail == "three ended with exit code 1; two ended by SIGKILL"


def test_a_second_supervisor_finds_the_first(home: Path) -> None:
    plan = make_plan(home, shell("one"))
    first = stacks.start(plan)
    with pytest.raises(StackFailed, match="supervisor has ended"):
        stacks.start(make_plan(home, shell("other")))
    assert f"process {first.pid} supervises" in log_of(home, "supervisor")
    assert the_stack(home).services["one"].restarts == 0
    assert [service.name for service in report(home).services] == ["one"]


def test_stopping_while_starting(home: Path) -> None:
    told: list[Stack] = []

    def stop_when_started(stack: Stack) -> None:
        if not told and stack.services["two"].pid:
            told.append(stack)
            os.kill(stack.pid, signal.SIGTERM)

    with pytest.raises(StackFailed, match="stopped while it was starting"):
        stacks.start(make_plan(home, shell("one"), shell("two", ready=Readiness.HEALTH)), stop_when_started)
    assert processes_of(home) == []


def test_logs_are_json_lines_whoever_wrote_them(home: Path) -> None:
    stacks.start(make_plan(home, stand_in("one")))
    stacks.stop(home)
    lines = [json.loads(line) for line in log_of(home, "one").splitlines()]
    assert {line["service"] for line in lines} == {"one"}
    assert {"one says hello on stdout", "started", "stopped"} <= {line["event"] for line in lines}
    supervisor = [json.loads(line) for line in log_of(home, "supervisor").splitlines()]
    assert {line["service"] for line in supervisor} == {"supervisor"}


def test_a_stuck_service_shows_in_the_status(home: Path) -> None:
    stack = stacks.start(make_plan(home, stand_in("one")))
    os.kill(stack.services["one"].pid, signal.SIGSTOP)
    path = home / "run" / "health" / "one.json"
    health = json.loads(path.read_text())
    path.write_text(json.dumps(health | {"monotonic_seconds": health["monotonic_seconds"] - 11}))
    found = report(home)
    assert not found.healthy
    assert (found.services[0].state, found.services[0].detail[:8]) == ("stale", "its loop")
    os.kill(stack.services["one"].pid, signal.SIGCONT)
    wait_until(lambda: report(home).healthy, 10, "all is well again")


def test_an_idle_supervisor_uses_no_cpu(home: Path) -> None:
    stack = stacks.start(make_plan(home, shell("one")))

    def cpu_ticks() -> int:
        fields = Path(f"/proc/{stack.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    before, until = cpu_ticks(), time.monotonic() + 1.0
    wait_until(lambda: time.monotonic() > until, 10, "a second has passed")
    assert cpu_ticks() - before <= 2


def test_a_plan_survives_the_file(tmp_path: Path) -> None:
    plan = Plan("/home", SERVICES, {"api": "x"}, {"A": "b"}, "/token", 3.0)
    plan.write(tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan


def test_the_table_stops_watchers_after_what_they_watch() -> None:
    groups = stop_order(SERVICES)
    assert groups[0] == ["api"]
    assert groups[1] == ["worker"]
    assert groups[-1] == ["server", "database"]
    assert sorted(name for group in groups for name in group) == sorted(service.name for service in SERVICES)


def test_a_circle_is_an_error() -> None:
    with pytest.raises(ValueError, match="circle"):
        stop_order((stand_in("one", after=("two",)), stand_in("two", after=("one",))))
