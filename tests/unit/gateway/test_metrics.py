"""Each metric changes by the messages that the table names, and by no others."""

from __future__ import annotations

import itertools
import math
import re

import pytest

from helpers.gateway import attempt_started, golden, golden_messages, parse_metrics, step
from surefoot.events import (
    CheckpointCommitted,
    CheckpointPruned,
    CheckpointVerified,
    CommandApplied,
    CommandRefused,
    IncidentChanged,
    IncidentState,
    JobFinished,
    JobState,
    JobStateChanged,
    Message,
    RankFailed,
    SaveIntervalChosen,
    StorageFailed,
    StorageRecovered,
)
from surefoot_gateway.board import Board
from surefoot_gateway.handlers import HANDLERS
from surefoot_gateway.registry import JobMetrics
from surefoot_gateway.table import METRICS, OPEN

JOB = (("job_id", "demo"),)


@pytest.fixture
def board() -> Board:
    made = Board(max_jobs=3)
    made.caught_up = True
    return made


def feed(board: Board, *messages: Message) -> None:
    for message in messages:
        HANDLERS[type(message)](board.job(message.job), message)


def scrape(board: Board) -> dict:
    return parse_metrics(board.render_metrics("text/plain")[0].decode())


def value(board: Board, name: str, **labels: str) -> float:
    return scrape(board)[name, tuple(sorted({"job_id": "demo", **labels}.items()))]


def test_names_units_and_labels_follow_the_rules() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"surefoot_[a-z]+(_[a-z]+)*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.kind != "histogram" or (metric.name.endswith("_seconds") and metric.buckets)
        assert metric.help.endswith("."), metric.name
        assert not {"step", "attempt", "id", "incident_id", "event_id"} & set(metric.label_names)
        assert all(values != OPEN or label == "rank" for label, values in metric.labels.items())
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_every_label_value_of_a_job_exists_from_0_when_it_is_first_seen(board: Board) -> None:
    board.job("demo")
    series = scrape(board)
    for metric in METRICS:
        if metric.kind == "gauge" and metric.initial is None:
            continue
        suffix = "_count" if metric.kind == "histogram" else ""
        for values in itertools.product(*metric.labels.values()):
            labels = dict(zip(metric.labels, values, strict=True)) | ({"job_id": "demo"} if metric.source else {})
            key = metric.name + suffix, tuple(sorted(labels.items()))
            assert series[key] == (1 if metric.name in ("surefoot_gateway_caught_up", "surefoot_gateway_jobs") else 0)
    assert not any("_created" in name for name, _ in series)


def variants() -> list[Message]:
    """All golden messages, and those that take another way through a handler."""
    others = [
        golden(CheckpointVerified, problem=None),
        golden(RankFailed, exit_code=1),
        golden(RankFailed, exit_code=-9),
        golden(IncidentChanged, state="HEALED"),
        golden(JobStateChanged, state="FAILED"),
        golden(JobFinished, state="SUCCEEDED"),
    ]
    return [*golden_messages(), *others]


def test_each_metric_is_touched_by_exactly_the_messages_that_the_table_names(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: dict[str, set[type[Message]]] = {metric.name: set() for metric in METRICS if metric.source}
    now: list[type[Message]] = []
    original = JobMetrics._get

    def spy(self, name, labels):
        touched[name].add(now[-1])
        return original(self, name, labels)

    monkeypatch.setattr(JobMetrics, "_get", spy)
    for message in variants():
        if type(message) in HANDLERS:
            now.append(type(message))
            feed(Board(3), message)
    assert touched == {metric.name: set(metric.source) for metric in METRICS if metric.source}


def test_a_run_with_a_restart_and_a_roll_back(board: Board) -> None:
    feed(board, attempt_started(1), *(step(n) for n in range(1, 6)))
    feed(board, golden(RankFailed, job="demo", exit_code=-9), attempt_started(2, from_attempt=1, from_step=5))
    feed(board, step(6, attempt=2), step(7, attempt=2, applied=False, loss=math.nan, grad_norm=math.inf))
    assert value(board, "surefoot_steps_total", outcome="applied") == 6
    assert value(board, "surefoot_steps_total", outcome="skipped") == 1
    assert value(board, "surefoot_tokens_total") == 7 * 2048
    assert value(board, "surefoot_step_seconds_sum") == pytest.approx(7 * 0.25)
    assert value(board, "surefoot_rank_step_seconds", rank="1") == 0.25
    assert math.isnan(value(board, "surefoot_training_loss"))
    assert value(board, "surefoot_attempts_total", kind="staged") == 1
    assert value(board, "surefoot_rank_failures_total", kind="signal") == 1
    assert value(board, "surefoot_job_state", state="RUNNING") == 1
    feed(board, attempt_started(3, from_attempt=2, from_step=4, world_size=1))
    assert (value(board, "surefoot_job_step"), value(board, "surefoot_job_attempt")) == (4, 3)
    assert ("surefoot_rank_step_seconds", (*JOB, ("rank", "1"))) not in scrape(board)


def incident(state: IncidentState, **fields) -> Message:
    return golden(IncidentChanged, job="demo", incident_id=7, kind="spike", state=state, **fields)


def test_an_incident_is_counted_once_however_often_it_changes(board: Board) -> None:
    nothing = {"recovery_seconds": None, "steps_lost": None}
    feed(board, incident(IncidentState.OPEN, **nothing), incident(IncidentState.ACTING, **nothing))
    assert value(board, "surefoot_incidents_open") == 1
    for state in (IncidentState.RESUMED, IncidentState.HEALED, IncidentState.HEALED):
        feed(board, incident(state, recovery_seconds=0.4, steps_lost=31))
    assert value(board, "surefoot_incidents_total", kind="spike") == 1
    assert value(board, "surefoot_incidents_closed_total", kind="spike", outcome="healed") == 1
    assert value(board, "surefoot_incidents_open") == 0
    assert value(board, "surefoot_recovery_seconds_count", kind="spike") == 1
    assert value(board, "surefoot_recovery_seconds_bucket", kind="spike", le="0.5") == 1
    assert value(board, "surefoot_steps_lost_total") == 31


def test_values_that_nobody_knows_count_as_other(board: Board) -> None:
    feed(board, golden(IncidentChanged, job="demo", kind="comet"), golden(CommandApplied, job="demo", command="Dance"))
    feed(board, golden(CommandRefused, job="demo", command="Dance"))
    assert value(board, "surefoot_incidents_total", kind="other") == 1
    assert value(board, "surefoot_commands_total", action="other", outcome="applied") == 1
    assert value(board, "surefoot_commands_total", action="other", outcome="refused") == 1


def test_storage_fails_until_it_says_that_it_works_or_a_checkpoint_is_committed(board: Board) -> None:
    """The drain that failed may have been killed: its successor's first success ends the trouble too."""
    failed = [golden(StorageFailed, job="demo", num_failures=n) for n in (1, 2, 3)]
    feed(board, *failed)
    assert value(board, "surefoot_storage_failing") == 1
    assert value(board, "surefoot_storage_failures_total") == 3
    feed(board, golden(StorageRecovered, job="demo", seconds=12.0))
    assert value(board, "surefoot_storage_failing") == 0
    assert value(board, "surefoot_storage_outage_seconds_sum") == 12.0
    feed(board, failed[0], golden(CheckpointCommitted, job="demo"))
    assert value(board, "surefoot_storage_failing") == 0
    assert value(board, "surefoot_storage_failures_total") == 4


def test_what_retention_removes_and_what_auto_chose(board: Board) -> None:
    feed(board, *(golden(CheckpointPruned, job="demo", num_bytes=n) for n in (100, 20)))
    assert value(board, "surefoot_checkpoints_total", outcome="pruned") == 2
    assert value(board, "surefoot_checkpoint_pruned_bytes_total") == 120
    assert ("surefoot_save_interval_seconds", JOB) not in scrape(board)  # 0 s would be a lie
    feed(board, golden(SaveIntervalChosen, job="demo", interval_seconds=63.0, save_cost_seconds=0.15))
    assert value(board, "surefoot_save_interval_seconds") == 63.0
    assert value(board, "surefoot_save_cost_seconds") == 0.15


def test_exactly_one_state_is_1(board: Board) -> None:
    for state in JobState:
        feed(board, JobStateChanged(job="demo", state=state, reason="a test"))
        series = scrape(board)
        states = [s for s in JobState if series["surefoot_job_state", (*JOB, ("state", s))] == 1]
        assert states == [state]


def test_drops_of_a_new_process_are_added_to_those_of_the_one_before(board: Board) -> None:
    feed(board, *(step(n, dropped_events=d) for n, d in enumerate([0, 3, 5, 2, 2, 4], 1)))
    assert value(board, "surefoot_events_dropped_total") == 5 + 4


def test_the_silent_job_goes_with_all_its_series(board: Board) -> None:
    for n, name in enumerate(["a", "b", "c", "a", "d"], 1):
        feed(board, step(n, job=name))
    assert list(board.jobs) == ["c", "a", "d"]
    series = scrape(board)
    assert {dict(labels)["job_id"] for _, labels in series if "job_id" in dict(labels)} == {"a", "c", "d"}
    assert series["surefoot_gateway_jobs", ()] == 3


def test_ranks_beyond_64_have_no_series(board: Board) -> None:
    feed(board, step(1, step_seconds=tuple(0.1 for _ in range(100))))
    assert sum(name == "surefoot_rank_step_seconds" for name, _ in scrape(board)) == 64
