from __future__ import annotations

import pytest

from surefoot.progress import Phase, Progress
from surefoot.spec import HangSpec
from surefoot_worker.launcher.failure import ErrorReport, Failure, left_early
from surefoot_worker.launcher.hang import Hang, HangWatch
from surefoot_worker.launcher.policy import History, decide


def at(step: int, since: float = 0.0, phase: Phase = Phase.STEP, attempt: int = 1, start_step: int = 0) -> Progress:
    return Progress(10, attempt, step, start_step, phase, since)


def wait(
    watch: HangWatch, pages: dict[int, Progress | None], start: float, seconds: int, ended: set[int]
) -> Hang | None:
    """Look each second; return what was found first."""
    found = (watch.look(pages, ended, start + second) for second in range(seconds + 1))
    return next((hang for hang in found if hang is not None), None)


def test_who_did_not_come_to_the_wait_is_furthest_behind() -> None:
    watch = HangWatch(HangSpec(step_seconds=10))
    hang = wait(watch, {0: at(4, since=7.0), 1: at(4, since=5.0), 2: at(4, since=7.1)}, 100, 12, set())
    assert hang is not None
    assert (hang.rank, hang.phase, hang.limit_seconds) == (1, "step", 10)
    assert hang.seconds == 11


@pytest.mark.parametrize(
    ("phase", "limit"), [(Phase.START, 100), (Phase.EVAL, 200), (Phase.SAVE, 300), (Phase.CLOSE, 300)]
)
def test_each_phase_has_its_limit(phase: Phase, limit: int) -> None:
    spec = HangSpec(start_seconds=100, step_seconds=10, eval_seconds=200, save_seconds=300)
    assert wait(HangWatch(spec), {0: at(4, phase=phase)}, 0, limit, set()) is None
    assert wait(HangWatch(spec), {0: at(4, phase=phase)}, 0, limit + 1, set()) is not None


def test_first_step_of_an_attempt_may_compile() -> None:
    spec = HangSpec(start_seconds=100, step_seconds=10)
    assert wait(HangWatch(spec), {0: at(7, start_step=7)}, 0, 100, set()) is None
    assert wait(HangWatch(spec), {0: at(7, start_step=7)}, 0, 101, set()) is not None


def test_after_the_session_a_program_may_take_its_time() -> None:
    assert wait(HangWatch(HangSpec(save_seconds=10)), {0: at(9, phase=Phase.DONE)}, 0, 10000, set()) is None


def test_a_rank_that_ended_is_not_waited_for_but_may_be_guilty() -> None:
    watch = HangWatch(HangSpec(step_seconds=10))
    assert wait(watch, {0: at(9, phase=Phase.DONE), 1: at(8)}, 0, 100, {1}) is None
    hang = wait(HangWatch(HangSpec(step_seconds=10)), {0: at(8, since=2.0), 1: at(8, since=1.0)}, 0, 100, {1})
    assert hang is not None
    assert hang.rank == 1


def test_nobody_is_judged_without_the_sdk_until_one_rank_used_it() -> None:
    watch = HangWatch(HangSpec(start_seconds=10))
    assert wait(watch, {0: None, 1: None}, 0, 1000, set()) is None
    assert wait(watch, {0: at(0, phase=Phase.START), 1: None}, 1001, 5, set()) is None
    hang = wait(watch, {0: at(0, phase=Phase.START), 1: None}, 1007, 100, set())
    assert hang is not None
    assert hang.rank == 1


def test_disabled() -> None:
    assert wait(HangWatch(HangSpec(step_seconds=1, enabled=False)), {0: at(4)}, 0, 100, set()) is None


def test_limit_follows_the_median_step() -> None:
    watch = HangWatch(HangSpec(start_seconds=5000))
    now = 0.0
    for step in range(1, 12):
        watch.look({0: at(step)}, set(), now)
        now += 20
    hang = wait(watch, {0: at(11)}, now, 700, set())
    assert hang is not None
    assert hang.limit_seconds == 600  # 30 x 20 s
    fast = HangWatch(HangSpec())
    for step in range(1, 12):
        fast.look({0: at(step)}, set(), float(step))
    hang = wait(fast, {0: at(11)}, 11, 400, set())
    assert hang is not None
    assert hang.limit_seconds == 300


def test_time_in_which_the_machine_slept_does_not_count() -> None:
    watch = HangWatch(HangSpec(step_seconds=10))
    watch.look({0: at(4)}, set(), 0)
    assert watch.look({0: at(4)}, set(), 100_000) is None


def test_new_ranks_begin_anew_and_an_older_attempt_is_behind() -> None:
    watch = HangWatch(HangSpec(step_seconds=10, start_seconds=10))
    wait(watch, {0: at(4)}, 0, 9, set())
    watch.ranks_started()
    assert wait(watch, {0: at(4)}, 10, 9, set()) is None
    hang = wait(watch, {0: at(3, attempt=2), 1: at(9)}, 20, 12, set())
    assert hang is not None
    assert hang.rank == 1


def test_the_same_hang_twice_is_not_restarted() -> None:
    limits = {"max_restarts": 5, "window_seconds": 600.0, "now": 0.0}
    failure = Failure(1, 10, -9, attempt=1, step=4, hang=Hang(1, at(4), 12, 10))
    assert failure.summary() == "rank 1 hung in phase step after step 4: no progress for 12 s, allowed are 10 s"
    first = decide(failure, History(), **limits)
    assert first.restart
    again = decide(failure, first.history, **limits)
    assert not again.restart
    assert "twice at step 4" in again.reason


def test_only_a_lost_connection_is_an_echo() -> None:
    def report(message: str) -> ErrorReport:
        return ErrorReport("RuntimeError", ("RuntimeError",), message, "Traceback", 1, 1.0)

    assert left_early(report("out of memory")) is None
    found = left_early(report("[pair.cc:553] Connection closed by peer [127.0.0.1]:14652"))
    assert found is not None
    assert Failure(1, 10, 0, step=4, report=found).summary() == (
        "rank 1 left its loop after step 4 and ended, while other ranks went on"
    )
