"""Case P3: a rank raises, leaves its loop early, sleeps for ever; the guilty one is named each time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from helpers import p3_trainer
from helpers.jobs import Job
from surefoot.events import JobFinished, JobState, RankFailed, RankHung, RanksRestarted

MakeJob = Callable[..., Job]


def test_p3_each_way_to_stop_names_the_guilty_rank(make_job: MakeJob) -> None:
    job = make_job(
        entrypoint=p3_trainer.__file__,
        checkpoint={"save_every_steps": 100},
        spec={"hang": {"step_seconds": 2.0, "start_seconds": 30.0}},
    )
    job.run()
    raised, left = job.events(RankFailed)
    assert (raised.rank, raised.step, raised.error_type) == (1, 4, "ValueError")
    assert (left.rank, left.step, left.error_type, left.exit_code) == (1, 6, "LeftEarly", 0)
    (hung,) = job.events(RankHung)
    assert (hung.rank, hung.step, hung.phase, hung.limit_seconds) == (1, 8, "step", 2.0)
    assert 2.0 < hung.seconds < 6.0
    assert hung.attempt == 3
    stacks = Path(hung.stack_file or hung.stack_problem or "").read_text()
    assert "sleep_for_ever" in stacks.partition("rank 1")[2]
    assert "backward" in stacks.partition("rank 1, pid")[0].partition("rank 0, pid")[2]
    restarts = job.events(RanksRestarted)
    assert [event.restart for event in restarts] == [0, 1, 2, 3]
    assert {"detect", "stacks_saved", "killed"} <= {mark.name for mark in restarts[3].timeline}
    assert job.events(JobFinished)[0].state is JobState.SUCCEEDED
    assert "rank 1 hung in phase step after step 8" in job.records()[4].cause
