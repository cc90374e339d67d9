from __future__ import annotations

import pytest

from surefoot.errors import EXIT_USAGE
from surefoot.progress import Phase, Progress
from surefoot_worker.launcher.failure import ErrorReport, Failure, RankExit, first_of
from surefoot_worker.launcher.policy import History, Verdict, decide, progress_ignored, spend

NOTHING = History()


def report(error: type[BaseException] = ValueError, message: str = "boom", seconds: float = 1.0) -> ErrorReport:
    bases = tuple(cls.__name__ for cls in error.__mro__)
    return ErrorReport(error.__name__, bases, message, "Traceback ...", 1, seconds)


def failed(error: ErrorReport | None = None, *, code: int = 1, step: int | None = 5) -> Failure:
    return Failure(rank=1, pid=100, exit_code=code, attempt=1, step=step, report=error)


def judge(failure: Failure, history: History = NOTHING, *, now: float = 1000.0, max_restarts: int = 3) -> Verdict:
    return decide(failure, history, max_restarts=max_restarts, window_seconds=60.0, now=now)


def test_a_killed_rank_is_restarted_until_the_budget_is_used_up() -> None:
    history = History()
    for moment in (1000.0, 1001.0, 1002.0):
        verdict = judge(failed(code=-9), history, now=moment)
        assert verdict.restart
        history = verdict.history
    refused = judge(failed(code=-9), history, now=1003.0)
    assert not refused.restart
    assert "restart.max_restarts" in refused.reason


def test_the_budget_comes_back_when_the_window_has_passed() -> None:
    history = History(restarted_at=(1000.0, 1001.0, 1002.0))
    assert not judge(failed(code=-9), history, now=1059.9).restart
    verdict = judge(failed(code=-9), history, now=1060.5)
    assert verdict.restart
    assert verdict.history.restarted_at == (1001.0, 1002.0, 1060.5)


def test_no_restarts_allowed() -> None:
    assert not judge(failed(code=-9), max_restarts=0).restart


@pytest.mark.parametrize("error", [ImportError, ModuleNotFoundError, SyntaxError, IndentationError])
def test_p2_errors_of_the_program_text_are_never_retried(error: type[BaseException]) -> None:
    assert not judge(failed(report(error))).restart


def test_p2_usage_errors_are_never_retried() -> None:
    assert not judge(failed(code=EXIT_USAGE)).restart


def test_p2_the_same_error_at_the_same_step_is_retried_once() -> None:
    first = judge(failed(report()))
    assert first.restart
    second = judge(failed(report()), first.history)
    assert not second.restart
    assert "twice" in second.reason


def test_p2_the_same_error_counts_even_when_a_kill_came_between() -> None:
    history = judge(failed(report())).history
    history = judge(failed(code=-9), history).history
    assert not judge(failed(report()), history).restart


@pytest.mark.parametrize(
    "other",
    [failed(report(), step=6), failed(report(message="bang")), failed(report(KeyError))],
    ids=["step", "message", "type"],
)
def test_another_error_or_step_is_another_matter(other: Failure) -> None:
    assert judge(other, judge(failed(report())).history).restart


def test_addresses_in_the_message_make_no_difference() -> None:
    history = judge(failed(report(message="<Tensor at 0x7f12ab>"))).history
    assert not judge(failed(report(message="<Tensor at 0x7fffff>")), history).restart


def test_a_death_without_report_caused_the_exceptions_of_the_others() -> None:
    echo = RankExit(0, 1, report(RuntimeError, "Connection closed by peer"))
    assert first_of([echo, RankExit(1, -9, None)]).rank == 1


def test_of_two_exceptions_the_earlier_is_the_cause() -> None:
    echo = RankExit(0, 1, report(RuntimeError, "Connection closed by peer", seconds=10.002))
    assert first_of([echo, RankExit(1, 1, report(seconds=10.001))]).rank == 1


def test_summaries_say_who_and_why() -> None:
    assert failed(code=-9).summary() == "rank 1 was killed by SIGKILL after step 5"
    assert failed(report(message="a\nb"), step=None).summary() == "rank 1 raised ValueError: a"
    assert failed(code=3, step=None).summary() == "rank 1 exited with status 3"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("/x/.tmp-123-abc-000004.json", "/x/.tmp-98-7de-000004.json"),
        ("no such file: '/tmp/tmpab12_x9z/f'", "no such file: '/tmp/tmpqqqqqqqq/f'"),
        ("key 3f2a9c0d17 is gone", "key 00aa9c0d18 is gone"),
        ("run 123e4567-e89b-12d3-a456-426614174000", "run 00000000-e89b-12d3-a456-426614174fff"),
        ("worker (pid 12) died", "worker (pid 345) died"),
    ],
)
def test_random_names_in_the_message_make_no_difference(one: str, other: str) -> None:
    history = judge(failed(report(message=one))).history
    assert not judge(failed(report(message=other)), history).restart


def test_numbers_that_mean_something_make_a_difference() -> None:
    history = judge(failed(report(message="expected 12 rows in a.json"))).history
    assert judge(failed(report(message="expected 13 rows in a.json")), history).restart


def test_restarts_in_the_future_count_as_made_now() -> None:
    """The clock was set back by an hour: they must not block the job until it has caught up."""
    history = History(restarted_at=(4600.0, 4601.0))
    verdict = judge(failed(code=-9), history, now=1000.0)
    assert verdict.restart
    assert verdict.history.restarted_at == (1000.0, 1000.0, 1000.0)
    refused = judge(failed(code=-9), verdict.history, now=1001.0)
    assert not refused.restart
    assert judge(failed(code=-9), refused.history, now=1060.5).restart


def test_starts_that_fail_use_up_the_same_budget() -> None:
    history = judge(failed(report())).history
    for moment in (1001.0, 1002.0):
        verdict = spend(history, max_restarts=3, window_seconds=60.0, now=moment)
        assert verdict.restart
        history = verdict.history
    assert history.seen
    assert not spend(history, max_restarts=3, window_seconds=60.0, now=1003.0).restart


def ended(start_step: int, step: int, phase: Phase) -> Progress:
    return Progress(100, 2, step, start_step, phase, 1.0)


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([None, None], "none called surefoot.sdk.attach although the job had progress"),
        ([ended(10, 10, Phase.START), ended(10, 10, Phase.DONE)], "rank 0 loaded step 10 and ended without"),
        ([ended(10, 10, Phase.DONE), ended(10, 10, Phase.START)], "rank 1 loaded step 10"),
        ([ended(10, 10, Phase.DONE)] * 2, None),  # there was nothing left to train
        ([ended(10, 10, Phase.CLOSE)], None),
        ([ended(10, 12, Phase.STEP)], None),  # left its loop early; the newest snapshot is made durable
        ([ended(10, 10, Phase.STEP)], None),  # so did one with its work done: it took a batch, and no step
        ([ended(0, 0, Phase.START)], None),
    ],
)
def test_r8_ranks_that_end_well_without_going_on_from_the_progress(
    ranks: list[Progress | None], reason: str | None
) -> None:
    found = progress_ignored(dict(enumerate(ranks)), had_progress=True)
    assert (found is None) == (reason is None)
    if found is not None and reason is not None:
        assert reason in found
        assert "--from-seed" in found
    assert progress_ignored(dict(enumerate(ranks)), had_progress=False) is None
