"""Submitting, stopping and asking recovery for something, on the real database and the real bus."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from sqlalchemy import select

from helpers.api import Api
from helpers.rows import NOW, checkpoint_row, started_attempt
from surefoot.bus.base import Outgoing
from surefoot.bus.redis_bus import RedisBus
from surefoot.bus.streams import REQUESTS
from surefoot.catalogue.models import Action, AuditEntry, Incident, Job, Operation
from surefoot.errors import BusUnavailable
from surefoot.events import RollBackRequested, SaveRequested, SetLearningRateRequested


def requests(bus: RedisBus) -> list:
    return [delivery.message for delivery in bus.read(REQUESTS, "0", 100, 0.0)]


def audit(api: Api) -> list[tuple]:
    with api.database.read() as session:
        rows = session.scalars(select(AuditEntry).order_by(AuditEntry.id))
        return [(row.method, row.path, row.status, row.job) for row in rows]


def test_submit_stop_and_submit_again(api: Api, tmp_path: Path) -> None:
    spec = api.spec(tmp_path)
    made = api.client.post("/api/v1/jobs", json={"spec": spec})
    assert (made.status_code, made.headers["Location"]) == (201, "/api/v1/jobs/j")
    assert (made.json()["state"], made.json()["generation"], made.json()["spec"]) == ("PENDING", 1, spec)
    again = api.client.post("/api/v1/jobs", json={"spec": spec})
    assert (again.status_code, again.json()["error_code"]) == (409, "job_active")

    api.set_run("j", state="RUNNING", attempt=1, step=7)
    assert api.client.get("/api/v1/jobs/j").json()["step"] == 7
    stop = api.client.post("/api/v1/jobs/j/stop")
    assert (stop.status_code, stop.json()["state"]) == (202, "RUNNING")
    assert api.client.get("/api/v1/jobs/j").json()["desired_state"] == "STOPPED"
    where = stop.headers["Location"]
    api.set_run("j", state="STOPPED", reason="stopped on request")
    assert api.client.get(where).json()["state"] == "SUCCEEDED"
    late = api.client.post("/api/v1/jobs/j/stop")
    assert (late.status_code, late.json()["error_code"]) == (409, "job_not_active")

    resumed = api.client.post("/api/v1/jobs", json={"spec": spec, "from_seed": True}).json()
    assert (resumed["state"], resumed["generation"], resumed["step"]) == ("PENDING", 2, None)
    with api.database.read() as session:
        job = session.get_one(Job, "j")
        assert (job.desired_state, job.from_seed) == ("RUNNING", True)
    assert api.client.get(where).json()["state"] == "SUCCEEDED", "an operation of the generation before"
    kinds = [item["kind"] for item in api.client.get("/api/v1/jobs/j/operations").json()["operations"]]
    assert kinds == ["submit", "stop", "submit"]
    assert audit(api) == [
        ("POST", "/api/v1/jobs", 201, "j"),
        ("POST", "/api/v1/jobs", 409, None),
        ("POST", "/api/v1/jobs/j/stop", 202, "j"),
        ("POST", "/api/v1/jobs/j/stop", 409, "j"),
        ("POST", "/api/v1/jobs", 201, "j"),
    ]


def test_a_job_without_folders_gets_those_of_the_stack_and_keeps_only_what_is_set(api: Api, tmp_path: Path) -> None:
    spec = api.spec(tmp_path)
    del spec["storage"], spec["run_dir"]
    home = tmp_path / "home"
    kept = api.client.post("/api/v1/jobs", json={"spec": spec}).json()["spec"]
    assert kept == spec | {"storage": str(home / "checkpoints"), "run_dir": str(home / "run")}
    recipe = {"job": "r", "entrypoint": "-m surefoot_worker.recipe"}
    kept = api.client.post("/api/v1/jobs", json={"spec": recipe}).json()["spec"]
    assert kept["recipe"] == {"cache_dir": str(home / "data")}


BAD_KEYS: list[tuple[dict, str]] = [
    ({"nproc": 2}, "nproc"),
    ({"nproc_per_node": 0}, "nproc_per_node"),
    ({"job": "No/Name"}, "job"),
    ({"storage": "relative"}, "storage"),
    ({"entrypoint": "train.py"}, "entrypoint"),
    ({"entrypoint": "'"}, "entrypoint"),
    ({"env": {"PYTHONPATH": "/a:b"}}, "env.PYTHONPATH"),
    ({"checkpoint": {"staging_dir": "shm"}}, "checkpoint.staging_dir"),
]


def test_a_bad_spec_is_refused_and_the_key_named(api: Api, tmp_path: Path) -> None:
    for change, key in BAD_KEYS:
        answer = api.client.post("/api/v1/jobs", json={"spec": api.spec(tmp_path) | change})
        assert (answer.status_code, answer.json()["key"]) == (422, key)
        assert answer.json()["detail"].startswith(f"{key}: ")
    assert api.client.get("/api/v1/jobs").json()["jobs"] == []


@pytest.mark.parametrize("keys", ['"checkpoint": {"save_every_seconds": Infinity}', '"env": {"A": "\\ud800"}'])
def test_what_json_cannot_hold_is_refused(api: Api, keys: str) -> None:
    text = '{"spec": {"job": "j", "entrypoint": "/x.py", ' + keys + "}}"
    answer = api.client.post("/api/v1/jobs", content=text, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["key"]) == (422, "spec")


def test_what_this_machine_cannot_start_is_refused(api: Api, tmp_path: Path) -> None:
    api.parts.settings.api_preflight = True
    spec = api.spec(tmp_path)
    Path(spec["entrypoint"]).write_text("import surely_not_there")
    answer = api.client.post("/api/v1/jobs", json={"spec": spec})
    assert (answer.status_code, answer.json()["key"]) == (422, "entrypoint")
    assert not (tmp_path / "checkpoints").exists()
    Path(spec["entrypoint"]).write_text("")
    assert api.client.post("/api/v1/jobs", json={"spec": spec}).status_code == 201


def test_verbs_ask_recovery_once(api: Api, bus: RedisBus) -> None:
    api.add_job("j")
    key = {"Idempotency-Key": "one", "X-Surefoot-Actor": "anna"}
    body = {"to_step": 40, "to_attempt": 2, "lr_factor": 0.5}
    first = api.client.post("/api/v1/jobs/j/rollback", json=body, headers=key)
    assert (first.status_code, first.json()["state"], first.json()["actor"]) == (202, "PENDING", "anna")
    # Nothing has come of it: it is sent again under the same id, by which recovery knows it.
    second = api.client.post("/api/v1/jobs/j/rollback", json=body, headers=key)
    assert second.json()["id"] == first.json()["id"]
    assert [type(message) for message in requests(bus)] == [RollBackRequested] * 2
    assert {message.operation_id for message in requests(bus)} == {first.json()["id"]}
    message = requests(bus)[0]
    assert (message.to_step, message.to_attempt, message.lr_factor, message.actor) == (40, 2, 0.5, "anna")

    with api.database.write() as session:
        action = Action(
            job="j", attempt=1, kind="rollback", operation_id=first.json()["id"], reason="asked for by anna",
            state="SENT", created_at=NOW,
        )  # fmt: skip
        session.add(action)
    assert api.client.post("/api/v1/jobs/j/rollback", json=body, headers=key).json()["state"] == "RUNNING"
    assert len(requests(bus)) == 2, "recovery has it"
    for state, expected in (("APPLIED", "SUCCEEDED"), ("REFUSED", "FAILED"), ("EXPIRED", "FAILED")):
        with api.database.write() as session:
            session.get_one(Action, 1).state = state
        view = api.client.get(first.headers["Location"]).json()
        assert (view["state"], view["action_id"], view["detail"]) == (expected, 1, "asked for by anna")

    reused = api.client.post("/api/v1/jobs/j/rollback", json={}, headers=key)
    assert (reused.status_code, reused.json()["error_code"]) == (422, "idempotency_key_reused")
    api.client.post("/api/v1/jobs/j/checkpoint")
    api.client.post("/api/v1/jobs/j/set-lr", json={"lr_factor": 0.25, "lr_hold_steps": 5, "lr_rewarm_steps": 9})
    save, set_lr = requests(bus)[2:]
    assert isinstance(save, SaveRequested)
    assert isinstance(set_lr, SetLearningRateRequested)
    assert (set_lr.lr_factor, set_lr.lr_hold_steps, set_lr.lr_rewarm_steps) == (0.25, 5, 9)


def test_submitting_twice_with_one_key_submits_once(api: Api, tmp_path: Path) -> None:
    body, key = {"spec": api.spec(tmp_path)}, {"Idempotency-Key": "k"}
    for _ in range(2):
        assert api.client.post("/api/v1/jobs", json=body, headers=key).status_code == 201
    api.set_run("j", state="SUCCEEDED")
    repeated = api.client.post("/api/v1/jobs", json=body, headers=key)
    assert (repeated.status_code, repeated.json()["generation"]) == (201, 1)
    assert api.client.post("/api/v1/jobs", json=body).json()["generation"] == 2


BAD_ARGUMENTS: list[tuple[str, dict]] = [
    ("rollback", {"to_attempt": 1}),
    ("rollback", {"to_step": 0}),
    ("rollback", {"nonsense": 1}),
    ("set-lr", {}),
    ("set-lr", {"lr_factor": 0}),
    ("set-lr", {"lr_factor": "nan"}),
    ("set-lr", {"lr_factor": 0.5, "lr_rewarm_steps": 5}),
    ("stop", {"force": True}),
]


def test_arguments_that_make_no_sense_are_refused(api: Api, bus: RedisBus) -> None:
    api.add_job("j")
    for verb, body in BAD_ARGUMENTS:
        answer = api.client.post(f"/api/v1/jobs/j/{verb}", json=body)
        assert (answer.status_code, answer.json()["error_code"]) == (422, "invalid_request")
        assert answer.json()["errors"][0]["where"].startswith("body")
    assert requests(bus) == []


def test_verbs_need_a_job_that_is_active(api: Api, bus: RedisBus) -> None:
    api.add_job("ended", state="FAILED")
    assert api.client.post("/api/v1/jobs/ended/rollback").json()["error_code"] == "job_not_active"
    assert api.client.post("/api/v1/jobs/nobody/rollback").status_code == 404
    api.add_job("stopping")
    api.client.post("/api/v1/jobs/stopping/stop")
    assert api.client.post("/api/v1/jobs/stopping/stop").status_code == 202
    assert api.client.post("/api/v1/jobs/stopping/checkpoint").json()["error_code"] == "job_stopping"
    assert requests(bus) == []


def test_a_roll_back_to_a_step_finds_its_attempt(api: Api, bus: RedisBus) -> None:
    api.add_job("j")
    add_history(api)
    api.client.post("/api/v1/jobs/j/rollback", json={"to_step": 20}).raise_for_status()
    assert requests(bus)[0].to_attempt == 1
    abandoned = api.client.post("/api/v1/jobs/j/rollback", json={"to_step": 30})
    assert (abandoned.status_code, abandoned.json()["error_code"]) == (409, "no_such_checkpoint")


def test_an_operation_that_recovery_never_took_up_ends_with_the_job(api: Api) -> None:
    api.add_job("j")
    where = api.client.post("/api/v1/jobs/j/checkpoint").headers["Location"]
    api.set_run("j", state="SUCCEEDED")
    assert api.client.get(where).json()["state"] == "FAILED"


def test_with_the_bus_away_a_request_is_refused_and_made_good_later(
    api: Api, bus: RedisBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.add_job("j")

    def away(stream: str, items: list[Outgoing]) -> None:
        raise BusUnavailable("nobody answers")

    with monkeypatch.context() as outage:
        outage.setattr(bus, "publish", away)
        answer = api.client.post("/api/v1/jobs/j/rollback", headers={"Idempotency-Key": "k"})
    assert (answer.status_code, answer.json()["error_code"]) == (503, "bus_unavailable")
    assert int(answer.headers["Retry-After"]) > 0
    later = api.client.post("/api/v1/jobs/j/rollback", headers={"Idempotency-Key": "k"})
    assert later.status_code == 202
    assert [message.operation_id for message in requests(bus)] == [later.json()["id"]]
    with api.database.read() as session:
        assert len(list(session.scalars(select(Operation)))) == 1


def test_with_the_database_away_everything_is_503(api: Api, database_url: str) -> None:
    api.add_job("j")
    path = Path(database_url.removeprefix("sqlite:///"))
    api.database.close()
    away = path.rename(path.with_suffix(".away"))
    for answer in (api.client.get("/api/v1/jobs"), api.client.post("/api/v1/jobs/j/stop")):
        assert (answer.status_code, answer.json()["error_code"]) == (503, "catalogue_unavailable")
        assert "Retry-After" in answer.headers
    away.rename(path)
    assert api.client.get("/api/v1/jobs/j").status_code == 200


def add_history(api: Api) -> None:
    with api.database.write() as session:
        session.add_all([started_attempt(1, job="j"), started_attempt(2, 1, 20, job="j")])
        for attempt, step in ((1, 10), (1, 20), (1, 30), (2, 40)):
            session.add(checkpoint_row(attempt, step, job="j", stable=step <= 20))


def test_attempts_and_checkpoints(api: Api) -> None:
    api.add_job("j")
    add_history(api)
    rows = api.client.get("/api/v1/jobs/j/checkpoints").json()["checkpoints"]
    assert [(row["step"], row["on_lineage"], row["stable"]) for row in rows] == [
        (40, True, False), (30, False, False), (20, True, True), (10, True, True),
    ]  # fmt: skip
    assert [row["attempt"] for row in api.client.get("/api/v1/jobs/j/attempts").json()["attempts"]] == [2, 1]


def test_incidents_with_their_actions(api: Api) -> None:
    api.add_job("j")
    with api.database.write() as session:
        session.add(
            Incident(
                job="j", event_id="e", attempt=1, kind="spike", severity="critical", state="ACTING", onset_step=5,
                cause="loss",
                evidence={"loss": math.nan, "grad_norm": math.inf}, opened_at=NOW,
            )
        )  # fmt: skip
        session.flush()
        for kind in ("set_lr", "rollback"):
            session.add(
                Action(job="j", attempt=1, kind=kind, incident_id=1, reason="r", state="SENT", created_at=NOW)
            )
    listed = api.client.get("/api/v1/jobs/j/incidents").json()["incidents"]
    assert listed[0]["evidence"] == {"loss": "NaN", "grad_norm": "Infinity"}
    one = api.client.get("/api/v1/incidents/1").json()
    assert [action["kind"] for action in one["actions"]] == ["set_lr", "rollback"]
    assert one["evidence"] == listed[0]["evidence"]
    assert api.client.get("/api/v1/incidents/2").json()["error_code"] == "incident_not_found"


def test_pages(api: Api) -> None:
    names = [f"job-{number}" for number in range(7)]
    for number, name in enumerate(names):
        api.add_job(name, seconds=number // 2)
    seen, token = [], None
    while True:
        page = api.client.get("/api/v1/jobs", params={"max_results": 3} | ({"page_token": token} if token else {}))
        seen += [job["name"] for job in page.json()["jobs"]]
        token = page.json()["next_page_token"]
        if token is None:
            break
        api.add_job(f"newer-{len(seen)}", seconds=60)  # shifts nothing
    assert seen[:1] == ["job-6"]
    assert sorted(seen) == names
    for bad in ("x", "W10=", "WzFd", "WyJ4IiwieSJd", "WyIyMDI2LTEyLTAxIiwiaiJd"):
        answer = api.client.get("/api/v1/jobs", params={"page_token": bad})
        assert (answer.status_code, answer.json()["error_code"]) == (422, "invalid_page_token")
    assert api.client.get("/api/v1/jobs", params={"max_results": 0}).status_code == 422
