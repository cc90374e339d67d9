"""The commands that call the api, against a real one."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from helpers.api import Api
from helpers.command_line import Surefoot
from helpers.rows import NOW, checkpoint_row, started_attempt
from helpers.waiting import wait_until
from surefoot.bus.publisher import Publisher
from surefoot.bus.redis_bus import RedisBus
from surefoot.bus.streams import REQUESTS, logs_stream
from surefoot.catalogue.models import Action, Incident, Job, Operation
from surefoot.cli import client, client_stream, client_watch
from surefoot.events import (
    AttemptStarted,
    Event,
    IncidentChanged,
    IncidentState,
    JobFinished,
    JobState,
    JobStateChanged,
    LogLine,
    StepCompleted,
)


@pytest.fixture
def publisher(bus: RedisBus) -> Publisher:
    return Publisher(bus, "test")


def test_submit_sends_paths_that_mean_the_same_elsewhere(
    api: Api, surefoot: Surefoot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "spec.json").write_text(
        json.dumps({"job": "j", "entrypoint": "train.py --lr 1", "storage": "saved", "env": {"PYTHONPATH": "lib"}})
    )
    result = surefoot("submit", "spec.json")
    assert (result.code, result.out.splitlines()[0]) == (0, "job j was submitted")
    with api.database.read() as session:
        spec = session.get_one(Job, "j").spec
        assert session.scalars(select(Operation)).one().actor == "anna"
    assert spec == {
        "job": "j",
        "entrypoint": f"{folder}/train.py --lr 1",
        "storage": str(folder / "saved"),
        "run_dir": str(tmp_path / "home" / "run"),
        "env": {"PYTHONPATH": str(folder / "lib")},
    }
    active = surefoot("submit", "spec.json")
    assert (active.code, "is PENDING" in active.err) == (1, True)
    (folder / "spec.json").write_text(json.dumps({"job": "k", "entrypoint": "-m mine.train"}))
    surefoot("submit", "spec.json", "--from-seed")
    with api.database.read() as session:
        job = session.get_one(Job, "k")
        assert (job.spec["env"], job.from_seed) == ({"PYTHONPATH": str(folder)}, True)
    (folder / "spec.json").write_text(json.dumps({"job": "l", "entrypoint": "'"}))
    bad = surefoot("submit", "spec.json")
    assert (bad.code, "entrypoint: " in bad.err) == (2, True)


def test_jobs_and_checkpoints(api: Api, surefoot: Surefoot) -> None:
    api.add_job("old", state="FAILED", reason="rank 1 raised\nTraceback", step=7, total_steps=9, attempt=2)
    api.add_job("new", seconds=5)
    table = surefoot("jobs").out
    assert table.index("new") < table.index("old")
    for part in ("7 / 9", "FAILED", "rank 1 raised", "2026-12-01 12:00:05"):
        assert part in table
    assert "Traceback" not in table
    assert [row["name"] for row in json.loads(surefoot("jobs", "--json").out)] == ["new", "old"]
    assert [row["name"] for row in json.loads(surefoot("jobs", "--json", "-n", 1).out)] == ["new"]
    with api.database.write() as session:
        session.add_all([started_attempt(1, job="old"), started_attempt(2, 1, 20, job="old")])
        rows: list[tuple[int, int, dict[str, Any]]] = [
            (1, 20, {"stable": True}), (1, 30, {"pinned": True}), (2, 40, {"loss": 2.34567}),
            (2, 35, {"state": "DELETING"}),
        ]  # fmt: skip
        session.add_all(checkpoint_row(a, s, job="old", verified_at=NOW, **given) for a, s, given in rows)
    lines = surefoot("checkpoints", "old").out.splitlines()
    assert [line.split()[:7] for line in lines[1:]] == [
        ["40", "2", "current", "-", "-", "2.346", "ok"],
        ["35", "2", "deleting", "-", "-", "-", "ok"],
        ["30", "1", "abandoned", "-", "yes", "-", "ok"],
        ["20", "1", "current", "yes", "-", "-", "ok"],
    ]
    assert len(json.loads(surefoot("checkpoints", "of", "old", "--json").out)) == 4
    missing = surefoot("checkpoints", "nobody")
    assert (missing.code, "there is no job 'nobody'" in missing.err) == (1, True)


def test_all_pages_are_read(api: Api, surefoot: Surefoot, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        api.add_job(f"job-{number}", seconds=number)
    with client.connect(Path()) as own:
        monkeypatch.setattr(own, "get", lambda *path, get=own.get, **given: get(*path, **{**given, "max_results": 2}))
        assert len(own.list("jobs", "jobs")) == 5
        assert len(own.list("jobs", "jobs", limit=3)) == 3


def test_incidents(api: Api, surefoot: Surefoot) -> None:
    api.add_job("j")
    with api.database.write() as session:
        session.add(
            Incident(
                job="j", event_id="e", attempt=1, kind="spike", severity="critical", state="HEALED", onset_step=5,
                cause="loss 9.1, 3.2 before", evidence={"z": 8.0}, outcome="rolled back", recovery_seconds=0.512,
                steps_lost=12, opened_at=NOW,
            )
        )  # fmt: skip
        session.flush()
        session.add(
            Action(job="j", attempt=1, kind="rollback", incident_id=1, reason="why not", state="SENT", created_at=NOW)
        )
    table = surefoot("incidents", "j").out
    for part in ("spike", "critical", "HEALED", "0.51 s", "12", "loss 9.1"):
        assert part in table
    one = surefoot("incidents", "j", 1).out
    for part in ("cause: loss 9.1", "outcome: rolled back", "rollback", "why not", "SENT"):
        assert part in one
    assert json.loads(surefoot("incidents", "j", 1, "--json").out)["actions"][0]["kind"] == "rollback"
    assert json.loads(surefoot("incidents", "j", "--json").out)[0]["steps_lost"] == 12
    assert surefoot("incidents", "other", 1).code == 2


def test_verbs_wait_for_what_they_ask_for(api: Api, bus: RedisBus, surefoot: Surefoot) -> None:
    api.add_job("j")

    def recovery() -> None:
        request = wait_until(lambda: bus.read(REQUESTS, "0", 10, 0.0), 10, "the request")[-1].message
        with api.database.write() as session:
            session.add(
                Action(
                    job="j", attempt=1, kind="rollback", operation_id=request.operation_id, reason="asked for",
                    state="APPLIED", new_attempt=2, created_at=NOW,
                )
            )  # fmt: skip

    thread = threading.Thread(target=recovery)
    thread.start()
    done = surefoot("rollback", "j", "--to-step", 5, "--to-attempt", 1, "--lr-factor", 0.5, "--wait")
    thread.join()
    assert done.out == "rollback of job j is done as attempt 2: asked for\n"
    assert bus.read(REQUESTS, "0", 10, 0.0)[0].message.lr_factor == 0.5
    assert "operation " in surefoot("save", "j").out
    assert "operation " in surefoot("set-lr", "j", 0.5, "--hold-steps", 5, "--rewarm-steps", 5).out
    bad = surefoot("set-lr", "j", 0.5, "--rewarm-steps", 5)
    assert (bad.code, "lr_hold_steps" in bad.err) == (2, True)
    assert surefoot("stop", "j").out.endswith("job j is being saved and stopped\n")  # the api logs to stdout here
    refused = surefoot("save", "j")
    assert (refused.code, "is to be STOPPED" in refused.err) == (1, True)
    api.set_run("j", state="STOPPED", reason="on request")
    assert surefoot("stop", "j").code == 1


def test_stop_waits(api: Api, surefoot: Surefoot) -> None:
    for name, state, code in (("good", "STOPPED", 0), ("bad", "FAILED", 1)):
        api.add_job(name)

        def worker(name: str = name, state: str = state) -> None:
            def is_asked_to_stop() -> bool:
                with api.database.read() as session:
                    return session.get_one(Job, name).desired_state == "STOPPED"

            wait_until(is_asked_to_stop, 10, "the stop")
            api.set_run(name, state=state, reason="so it ended")

        thread = threading.Thread(target=worker)
        thread.start()
        result = surefoot("stop", name, "--wait")
        thread.join()
        assert (result.code, result.out) == (code, f"job {name}: {state}: so it ended\n")


def story(job: str) -> list[Event]:
    step = {
        "job": job, "attempt": 1, "updates": 1, "epoch": 0, "loss": 5.0, "learning_rate": 1e-3, "applied": True,
        "num_samples": 8, "step_seconds": (0.1,),
    }  # fmt: skip
    return [
        JobStateChanged(job=job, state=JobState.RUNNING, reason=""),
        AttemptStarted(
            job=job, attempt=1, world_size=2, from_attempt=0, from_step=0, source="SEED", cause="c", total_steps=2
        ),
        StepCompleted(**step, step=1),
        IncidentChanged(
            job=job, incident_id=3, kind="spike", severity="critical", state=IncidentState.HEALED, action="rollback",
            reason="back in band", recovery_seconds=0.5, steps_lost=9,
        ),
        StepCompleted(**step, step=2),
        JobFinished(job=job, state=JobState.SUCCEEDED, reason="all steps are done", restarts=0),
    ]  # fmt: skip


@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("FAILED", 1), ("STOPPED", 75)])
def test_watch_shows_the_job_until_it_ends(
    api: Api, publisher: Publisher, surefoot: Surefoot, monkeypatch: pytest.MonkeyPatch, state: str, code: int
) -> None:
    monkeypatch.setattr(client_watch, "POLL_SECONDS", 0.02)
    api.add_job("j")

    def job() -> None:
        wait_until(lambda: api.follower.num_streams == 2, 10, "somebody watches")
        publisher.publish_all(story("j"))
        publisher.publish(LogLine(job="j", rank=1, stream="stdout", text="hello [/red]"), logs_stream("j"))
        api.set_run("j", state=state, step=2, reason="so it ended")

    thread = threading.Thread(target=job)
    thread.start()
    result = surefoot("watch", "j", "--plain")
    thread.join()
    assert result.code == code
    for part in (
        "attempt 1 starts at step 0 on 2 ranks", "incident 3, spike: HEALED, rollback (0.50 s, 9 steps lost)",
        "[rank 1] hello [/red]", "step 2 / 2", "incidents 1 healed", f"job j: {state} at step 2: so it ended",
    ):  # fmt: skip
        assert part in result.out
    again = surefoot("watch", "j")
    assert (again.code, again.out) == (code, f"job j: {state} at step 2: so it ended\n")


def test_logs(api: Api, publisher: Publisher, surefoot: Surefoot) -> None:
    api.add_job("j")
    for number in range(4):
        line = LogLine(job="j", rank=number % 2, stream="stdout", text=f"line {number}")
        publisher.publish(line, logs_stream("j"))
    assert surefoot("logs", "j").out.splitlines() == [f"[rank {n % 2}] line {n}" for n in range(4)]
    assert surefoot("logs", "j", "--rank", 1).out == "[rank 1] line 1\n[rank 1] line 3\n"
    assert surefoot("logs", "nobody").code == 1


def test_a_stream_comes_back_where_it_was(
    api: Api, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_stream, "RETRY_SECONDS", 0.01)
    api.add_job("j")
    lines = [LogLine(job="j", rank=0, stream="stdout", text=str(number)) for number in range(4)]
    publisher.publish_all(lines[:2], logs_stream("j"))
    got: list[str] = []

    def texts() -> list[str]:
        got.extend(message.text for message in stream.poll())
        return got

    with client.connect(Path()) as own:
        stream = client_stream.JobStream(own, "j", "logs")
        wait_until(lambda: texts() == ["0", "1"], 10, "what is there")
        stream._response.extensions["network_stream"].get_extra_info("socket").shutdown(2)
        publisher.publish_all(lines[2:], logs_stream("j"))
        wait_until(lambda: texts() == ["0", "1", "2", "3"], 10, "what came meanwhile")
        stream.close()


def test_a_wrong_token_and_an_api_that_is_away(
    api: Api, surefoot: Surefoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUREFOOT_API_TOKEN", "wrong")
    result = surefoot("jobs")
    assert (result.code, "Authorization" in result.err) == (1, True)
    monkeypatch.setenv("SUREFOOT_API_URL", "http://127.0.0.1:9")
    result = surefoot("jobs")
    assert (result.code, "http://127.0.0.1:9 does not answer" in result.err) == (1, True)
