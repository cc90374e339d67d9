"""The progress view: a fold over events, its rendering, and following files as they grow."""

from __future__ import annotations

import io
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from surefoot.cli.tail import EventTail, RankLogTail
from surefoot.cli.view import JobView, ViewMode, facts, plain_line, render, showing
from surefoot.cli.view_state import ViewState
from surefoot.events import (
    AnomalyDetected,
    AnomalyKind,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointPromoted,
    CheckpointQuarantined,
    CommandApplied,
    CommandRefused,
    DataPrepared,
    Event,
    IncidentChanged,
    IncidentState,
    JobFinished,
    JobState,
    JobStateChanged,
    JsonlSink,
    RankFailed,
    RankHung,
    RanksRestarted,
    RestoreFellBack,
    SaveIntervalChosen,
    Severity,
    SnapshotSkipped,
    StepCompleted,
    StorageFailed,
    StorageRecovered,
)
from surefoot.spec import JobSpec, parse_spec

TS = datetime(2026, 12, 1, tzinfo=UTC)


def step(number: int, at: float, **fields: object) -> StepCompleted:
    values: dict = {
        "job": "j", "attempt": 1, "updates": number, "epoch": 0, "loss": 5.0, "grad_norm": 0.5, "learning_rate": 1e-3,
        "applied": True, "num_samples": 8, "num_tokens": 1000, "step_seconds": (0.1,), "ts": TS,
    }  # fmt: skip
    return StepCompleted(step=number, monotonic_seconds=at, **(values | fields))


def started(attempt: int, from_step: int, source: str, at: float = 0.0) -> AttemptStarted:
    return AttemptStarted(
        job="j", attempt=attempt, world_size=2, from_attempt=attempt - 1, from_step=from_step, source=source,
        cause="c", total_steps=100, monotonic_seconds=at, ts=TS,
    )  # fmt: skip


def failed(rank: int, at: float, **fields: object) -> RankFailed:
    values: dict = {"pid": 42, "exit_code": -9, "detected_seconds": at, "monotonic_seconds": at, "ts": TS}
    return RankFailed(job="j", attempt=1, rank=rank, **(values | fields))


def committed(number: int, at: float) -> CheckpointCommitted:
    return CheckpointCommitted(
        job="j", attempt=1, step=number, world_size=2, num_bytes=10, write_seconds=0.1, monotonic_seconds=at, ts=TS
    )


def incident(number: int, state: IncidentState, **fields: object) -> IncidentChanged:
    values: dict = {"kind": "spike", "severity": "critical", "reason": "z 9", "ts": TS}
    return IncidentChanged(job="j", incident_id=number, state=state, **(values | fields))


def state_after(*events: Event) -> ViewState:
    state = ViewState("j")
    for event in events:
        state.apply(event)
    return state


def texts(state: ViewState) -> list[str]:
    return [note.text for note in state.notes]


def test_steps_set_the_figures_and_the_rate_is_over_step_times() -> None:
    state = state_after(started(1, 0, "SEED"), *[step(n, at=n * 0.5, loss=9.0 - n) for n in range(1, 6)])
    assert (state.step, state.total_steps, state.loss, state.first_loss) == (5, 100, 4.0, 8.0)
    assert state.throughput() == (2000.0, "tokens/s")
    assert texts(state) == ["attempt 1 starts at step 0 on 2 ranks"]


def test_rate_in_samples_where_tokens_are_not_told() -> None:
    state = state_after(step(1, 0.0, num_tokens=None), step(2, 0.5, num_tokens=None))
    assert state.throughput() == (16.0, "samples/s")
    assert state_after(step(1, 0.0)).throughput() is None
    assert state_after(step(1, 1.0), step(2, 1.0)).throughput() is None


def test_a_failure_and_its_recovery() -> None:
    state = state_after(
        started(1, 0, "SEED"), step(49, 9.5), step(50, 10.0), failed(1, 10.1), failed(0, 10.2),
        RanksRestarted(job="j", restart=1, world_size=2, start_method="forkserver", pids=(1, 2)),
        started(2, 50, "STAGED"), step(50, 10.05), step(51, 10.3, attempt=2), step(52, 10.8, attempt=2),
    )  # fmt: skip
    assert (state.step, state.restarts, state.attempt, state.num_attempts) == (52, 1, 2, 2)
    assert state.recovery_seconds == pytest.approx(0.2)
    assert texts(state)[1:] == [
        "rank 1 (pid 42) was killed by SIGKILL",
        "rank 0 (pid 42) was killed by SIGKILL",
        "attempt 2 restored from the memory snapshot of step 50",
        "recovered in 0.20 s: step 51 is done",
    ]
    assert state.throughput() == (pytest.approx(2000.0), "tokens/s"), "the pause is not in the rate"


def test_the_first_step_may_be_told_before_its_attempt() -> None:
    state = state_after(
        started(1, 0, "SEED"), step(50, 1.0), failed(1, 1.1), step(51, 2.0, attempt=2), started(2, 50, "STAGED"),
        step(52, 2.5, attempt=2),
    )  # fmt: skip
    assert (state.step, state.recovery_seconds) == (52, pytest.approx(0.9))
    assert state.throughput() == (2000.0, "tokens/s")


def test_a_step_of_a_rank_that_is_gone_changes_nothing() -> None:
    state = state_after(started(2, 50, "COMMITTED"), step(57, 1.0, attempt=1))
    assert (state.step, state.loss) == (50, None)


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (failed(0, 1.0, exit_code=3), "rank 0 (pid 42) exited with status 3"),
        (failed(0, 1.0, exit_code=-77), "rank 0 (pid 42) was killed by signal 77"),
        (
            failed(0, 1.0, exit_code=1, error_type="ValueError", error_message="bad\n"),
            "rank 0 (pid 42) raised ValueError: bad",
        ),
        (
            step(3, 1.0, applied=False, nonfinite_ranks=(1,)),
            "step 3: gradient not finite on rank 1; update skipped",
        ),
        (
            RestoreFellBack(job="j", source="COMMITTED", candidate_attempt=1, candidate_step=9, reason="checksum"),
            "the checkpoint of step 9 was not usable: checksum",
        ),
        (
            CheckpointQuarantined(job="j", step=9, file="rank-00000.safetensors", reason="size", moved_to="q"),
            "checkpoint of step 9 is damaged (rank-00000.safetensors: size)",
        ),
        (
            SnapshotSkipped(job="j", step=4, persist=True, reason="no free buffer", skipped_total=1),
            "step 4: save put off, no free buffer",
        ),
        (
            RanksRestarted(
                job="j", restart=0, world_size=1, start_method="spawn", start_method_reason="no fork", pids=(1,)
            ),
            "ranks start by spawn: no fork",
        ),
        (incident(1, IncidentState.OPEN), "incident 1, spike: OPEN: z 9"),
        (
            incident(1, IncidentState.HEALED, action="rollback", recovery_seconds=0.5, steps_lost=9),
            "incident 1, spike: HEALED, rollback (0.50 s, 9 steps lost): z 9",
        ),
        (
            AnomalyDetected(
                job="j", kind=AnomalyKind.SPIKE, severity=Severity.CRITICAL, onset_step=5, step=6, rule="spike",
                loss=9.0, message="loss 9, 4 before",
            ),
            "critical: loss 9, 4 before",
        ),
        (
            CommandApplied(job="j", number=1, command="RollBack", step=60, new_attempt=2, seconds=0.25),
            "step 60: RollBack was applied in 0.25 s",
        ),
        (
            CommandRefused(job="j", number=1, command="RollBack", step=60, reason="another attempt"),
            "step 60: RollBack was refused: another attempt",
        ),
        (
            RankHung(job="j", rank=1, pid=4, phase="step", step=9, seconds=300.4, limit_seconds=300.0),
            "rank 1 has hung in step after step 9 for 300 s",
        ),
        (DataPrepared(job="j", stage="tokens", detail="3 M tokens", seconds=2.04), "data: tokens: 3 M tokens (2.0 s)"),
        (
            JobFinished(job="j", state=JobState.FAILED, reason="budget spent\nTraceback ...", restarts=3),
            "FAILED: budget spent",
        ),
    ],
)
def test_notes(event: Event, text: str) -> None:
    assert texts(state_after(event)) == [text]


def test_snapshots_between_saves_that_are_skipped_make_no_note() -> None:
    state = state_after(SnapshotSkipped(job="j", step=4, persist=False, reason="busy", skipped_total=1))
    assert not state.notes


def storage_failed(number: int, reason: str = "ENOSPC: no space") -> StorageFailed:
    return StorageFailed(job="j", operation="write step-9", reason=reason, num_failures=number, ts=TS)


def test_storage_that_fails_is_a_note_per_reason_and_a_row_until_it_works() -> None:
    failures = [storage_failed(n) for n in (1, 2, 3)]
    state = state_after(started(1, 0, "SEED"), step(1, 1.0), *failures)
    assert texts(state)[1:] == ["storage fails to write step-9: ENOSPC: no space; what is to be saved waits"]
    assert dict(facts(state, 2.0))["storage"] == "fails (3 times so far): ENOSPC: no space"
    assert plain_line(state, 2.0).endswith("storage fails (3 times so far): ENOSPC: no space")
    state.apply(StorageRecovered(job="j", seconds=6.3, num_failures=3, ts=TS))
    assert texts(state)[-1] == "storage takes writes again, after 6.3 s"
    assert "storage" not in dict(facts(state, 2.0))
    state.apply(storage_failed(1))
    state.apply(committed(9, 3.0))  # of the next drain, which knows of no failure
    assert "storage" not in dict(facts(state, 4.0))


def test_what_auto_chose_is_shown_with_its_reason() -> None:
    chosen = SaveIntervalChosen(
        job="j", attempt=1, rank=0, step=5, interval_seconds=63.2, save_cost_seconds=0.15,
        mean_seconds_between_failures=13000.0, num_failures=2, reason="a save costs 0.15 s", ts=TS,
    )  # fmt: skip
    state = state_after(chosen)
    assert dict(facts(state, 0.0))["saves"] == "every 63 s (auto; one costs 0.15 s)"
    assert texts(state) == ["saves every 63 s from now on: a save costs 0.15 s"]


def test_newest_durable_checkpoint_and_its_age() -> None:
    state = state_after(committed(10, 5.0), committed(20, 8.0))
    assert (state.committed.step if state.committed else None, state.num_committed) == (20, 2)
    assert state.checkpoint_age_seconds(9.5) == 1.5
    assert ViewState("j").checkpoint_age_seconds(1.0) is None


def test_rendering_shows_every_figure() -> None:
    state = state_after(started(1, 0, "SEED"), step(1, 1.0), step(2, 1.5, loss=4.25), committed(2, 2.0), failed(1, 2.0))
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(render(state, 5.0))
    shown = console.export_text()
    for part in ("2 / 100", "4.2500", "2,000 tokens/s", "0.500", "0.001", "step 2, 3 s ago", "SIGKILL", "2 ranks"):
        assert part in shown
    assert "loss 4.2500" in plain_line(state, 5.0)


def test_incidents_the_job_s_state_and_what_is_stable_are_shown_where_services_tell_them() -> None:
    state = state_after(
        JobStateChanged(job="j", state=JobState.RUNNING, reason=""), incident(1, IncidentState.OPEN),
        incident(2, IncidentState.OPEN), incident(1, IncidentState.HEALED),
        CheckpointPromoted(job="j", step=40, cleared_through_step=60),
    )  # fmt: skip
    shown = dict(facts(state, 0.0))
    assert (shown["state"], shown["stable checkpoint"]) == ("RUNNING", "step 40")
    assert shown["incidents"] == "1 healed, 1 open"
    assert plain_line(state, 0.0).endswith("incidents 1 healed, 1 open")
    assert "incidents" not in dict(facts(ViewState("j"), 0.0))


def test_rendering_before_anything_happened_and_of_hostile_text() -> None:
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(render(ViewState("j"), 0.0))
    console.print(render(state_after(failed(0, 1.0, error_type="E", error_message="[/bold] [red")), 1.0))
    assert "starting ..." in console.export_text(clear=False)
    assert "[/bold] [red" in console.export_text()


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    return parse_spec({"job": "j", "entrypoint": "x.py", "run_dir": str(tmp_path)})


def test_event_tail_starts_at_the_end_of_what_is_there(spec: JobSpec) -> None:
    sink = JsonlSink(spec.events_path)
    sink.emit(step(1, 0.0))
    tail = EventTail(spec.events_path)
    assert tail.poll() == []
    sink.emit(step(2, 0.0))
    assert [event.step for event in tail.poll() if isinstance(event, StepCompleted)] == [2]
    assert tail.poll() == []
    sink.close()


def test_rank_logs_are_tagged_and_partial_lines_wait(tmp_path: Path) -> None:
    out, err = tmp_path / "rank-00000.out", tmp_path / "rank-00001.err"
    out.write_text("old\n")
    (tmp_path / "rank-notes.txt").write_text("not a log\n")
    tail = RankLogTail(tmp_path)
    out.write_text("old\n--- surefoot: rank 0 starts ---\nnew\npart")
    err.write_bytes(b"bad byte \xff\n")
    assert tail.poll() == [(0, "new"), (1, "bad byte �")]
    out.write_text("old\n--- surefoot: rank 0 starts ---\nnew\npartly\n")
    assert tail.poll() == [(0, "partly")]
    out.write_text("anew\n")
    assert tail.poll() == [(0, "anew")], "a log that was made anew is read from its start"
    assert RankLogTail(tmp_path / "missing").poll() == []


def test_following_without_a_terminal_prints_lines(spec: JobSpec) -> None:
    output = io.StringIO()
    console = Console(file=output, width=200)
    logs = spec.job_run_dir / "logs"
    logs.mkdir(parents=True)
    with showing(spec, console, ViewMode.LIVE):
        sink = JsonlSink(spec.events_path)
        for event in (started(1, 0, "SEED"), step(1, 0.0), failed(1, 1.0), JobFinished(job="j", state=JobState.FAILED, reason="r", restarts=0)):  # fmt: skip # noqa: E501
            sink.emit(event)
        sink.close()
        (logs / "rank-00001.err").write_text("Traceback [/red]\n")
    shown = output.getvalue()
    for part in ("[rank 1] Traceback [/red]", "rank 1 (pid 42) was killed by SIGKILL", "step 1 / 100", "FAILED: r"):
        assert part in shown
    assert "\x1b" not in shown


def test_following_on_a_terminal_draws_the_panel(spec: JobSpec) -> None:
    output = io.StringIO()
    view = JobView(spec, Console(file=output, width=120, force_terminal=True), ViewMode.LIVE)
    sink = JsonlSink(spec.events_path)
    sink.emit(step(7, 0.0))
    sink.close()
    stop = threading.Event()
    stop.set()
    view.follow(stop)
    assert "surefoot: j" in output.getvalue()
    assert view.state.step == 7


def test_quiet_shows_nothing(spec: JobSpec) -> None:
    output = io.StringIO()
    with showing(spec, Console(file=output), ViewMode.QUIET):
        pass
    assert output.getvalue() == ""
