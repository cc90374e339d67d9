from __future__ import annotations

import json
import math

import pytest
from starlette.testclient import TestClient

from helpers.gateway import attempt_started, golden, golden_messages, step
from surefoot.checkpoint.attempts import SkipWindow
from surefoot.events import (
    CheckpointCommitted,
    CheckpointPromoted,
    CheckpointPruned,
    IncidentChanged,
    Message,
    SaveIntervalChosen,
    StorageFailed,
    StorageRecovered,
)
from surefoot_gateway import web as web_module
from surefoot_gateway.board import Board
from surefoot_gateway.handlers import HANDLERS
from surefoot_gateway.web import Web


@pytest.fixture
def board() -> Board:
    made = Board(max_jobs=10)
    made.caught_up, made.bus_problem = True, None
    return made


def feed(board: Board, *messages: Message) -> None:
    for message in messages:
        job = board.job(message.job)
        job.view.revision += 1
        if type(message) in HANDLERS:
            HANDLERS[type(message)](job, message)


def client(board: Board, host: str = "127.0.0.1", silent_seconds: float = 0.0) -> TestClient:
    return TestClient(Web(board, lambda: silent_seconds).app(host), base_url="http://localhost", follow_redirects=False)


def job_json(board: Board, name: str = "demo") -> dict:
    answer = client(board).get(f"/live/jobs/{name}.json")
    assert answer.status_code == 200
    return json.loads(answer.text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_the_lineage_is_told_apart_from_what_was_given_up(board: Board) -> None:
    feed(board, attempt_started(1), *(step(n) for n in range(1, 31)))
    feed(board, attempt_started(2, from_attempt=1, from_step=30), *(step(n, attempt=2) for n in range(31, 41)))
    window = SkipWindow(start=34, stop=41)
    feed(board, attempt_started(3, from_attempt=1, from_step=20, lr_factor=0.5, skip_windows=(window,)))
    job = job_json(board)
    assert {line["attempt"]: line["kept_through"] for line in job["attempts"]} == {1: 20, 2: 0, 3: None}
    assert job["attempts"][2]["skip_windows"] == [[34, 41]]
    assert (job["step"], job["attempt"]) == (20, 3)
    assert len(job["curve"]["step"]) == 40


def test_every_kind_of_message_gives_valid_json(board: Board) -> None:
    feed(board, *(message.model_copy(update={"job": "demo"}) for message in golden_messages()))
    feed(board, step(9, loss=math.nan, grad_norm=math.inf, applied=False), step(10, num_tokens=None, step_seconds=()))
    job = job_json(board)
    assert job["numbers"]["unit"] == "samples"
    assert job["curve"]["loss_low"][-2] is None


def test_a_day_of_steps_stays_small(board: Board) -> None:
    feed(board, attempt_started(1), *(step(n, loss=5.0 + n % 7) for n in range(1, 5001)))
    feed(board, *(golden(CheckpointCommitted, job="demo", step=n) for n in range(400)))
    feed(board, *(golden(IncidentChanged, job="demo", incident_id=n) for n in range(400)))
    job = job_json(board)
    assert 500 <= len(job["curve"]["step"]) <= 1000
    assert (min(job["curve"]["loss_low"]), max(job["curve"]["loss_high"])) == (5, 11)
    assert (len(job["checkpoints"]), len(job["incidents"]), len(job["notes"])) == (300, 200, 200)
    assert len(json.dumps(job)) < 300_000


def test_a_repeated_commit_does_not_undo_a_promotion(board: Board) -> None:
    committed = golden(CheckpointCommitted, job="demo", attempt=1, step=10)
    feed(board, committed, golden(CheckpointPromoted, job="demo", attempt=1, step=10), committed)
    assert [line["state"] for line in job_json(board)["checkpoints"]] == ["stable"]


def texts(board: Board) -> list[str]:
    return [line["text"] for line in job_json(board)["notes"]]


def test_trouble_with_storage_is_on_the_page_until_it_is_over(board: Board) -> None:
    """One line when it begins and for each new reason, however often it is tried; then how long it took."""

    def failed(number: int, reason: str) -> Message:
        return golden(StorageFailed, job="demo", operation="write x", reason=reason, num_failures=number)

    feed(board, *(failed(n, "ENOSPC: no space") for n in (1, 2, 3)), failed(4, "EIO: input/output error"))
    assert job_json(board)["storage_problem"] == {
        "since": failed(1, "").ts.timestamp(),
        "operation": "write x",
        "reason": "EIO: input/output error",
        "num_failures": 4,
    }
    feed(board, golden(StorageRecovered, job="demo", seconds=7.5, num_failures=4))
    assert job_json(board)["storage_problem"] is None
    assert texts(board) == [
        "storage takes writes again, after 7.5 s; it failed 4 times",
        "storage fails to write x: EIO: input/output error; training goes on, what is to be saved waits",
        "storage fails to write x: ENOSPC: no space; training goes on, what is to be saved waits",
    ]
    feed(board, failed(1, "EIO"), golden(CheckpointCommitted, job="demo"))
    assert job_json(board)["storage_problem"] is None


def test_a_pruned_checkpoint_is_shown_no_more(board: Board) -> None:
    feed(board, *(golden(CheckpointCommitted, job="demo", attempt=1, step=n) for n in (10, 20)))
    feed(board, golden(CheckpointPruned, job="demo", attempt=1, step=10))
    feed(board, golden(CheckpointPruned, job="demo", attempt=7, step=99))  # of before the gateway's memory
    assert [line["step"] for line in job_json(board)["checkpoints"]] == [20]


def test_what_auto_chose_is_shown_with_its_reason(board: Board) -> None:
    feed(board, step(1))
    assert job_json(board)["saving"] is None
    feed(board, golden(SaveIntervalChosen, job="demo", interval_seconds=63.2, save_cost_seconds=0.15, reason="why"))
    assert job_json(board)["saving"] == {"interval_seconds": 63.2, "cost_seconds": 0.15, "reason": "why"}
    assert texts(board) == ["saves every 63 s from now on: why"]


def test_what_is_known_of_an_incident_stays_known(board: Board) -> None:
    change = {"job": "demo", "incident_id": 3}
    feed(board, golden(IncidentChanged, **change, state="RESUMED", recovery_seconds=0.4, action="rollback"))
    feed(board, golden(IncidentChanged, **change, state="HEALED", recovery_seconds=None, action=None))
    (line,) = job_json(board)["incidents"]
    assert (line["state"], line["recovery_seconds"], line["action"]) == ("HEALED", 0.4, "rollback")


def test_what_has_not_changed_is_not_sent_again(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_module, "MIN_REBUILD_SECONDS", 0.0)
    feed(board, step(1))
    browser = client(board)
    first = browser.get("/live/jobs/demo.json")
    again = browser.get("/live/jobs/demo.json", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    feed(board, step(2))
    changed = browser.get("/live/jobs/demo.json", headers={"If-None-Match": first.headers["etag"]})
    assert (changed.status_code, changed.json()["step"]) == (200, 2)


def test_jobs_are_listed_the_one_heard_of_last_first(board: Board) -> None:
    feed(board, step(1, job="a"), step(1, job="b"), step(2, job="a"))
    listed = client(board).get("/live/jobs.json").json()
    assert [line["job"] for line in listed["jobs"]] == ["a", "b"]


def test_metrics_speak_both_formats_without_redirect(board: Board) -> None:
    feed(board, step(1))
    text = client(board).get("/metrics")
    assert text.status_code == 200
    assert text.headers["content-type"].startswith("text/plain; version=")
    metrics = client(board).get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert metrics.headers["content-type"].startswith("application/openmetrics-text")
    assert metrics.text.endswith("# EOF\n")


def test_the_page_may_load_nothing_from_elsewhere(board: Board) -> None:
    answer = client(board).get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for word in ("src=\"http", "@import", "url(http", "<link rel=\"stylesheet"):
        assert word not in answer.text


def test_only_names_of_this_machine_are_answered_on_loopback(board: Board) -> None:
    assert client(board).get("/metrics", headers={"Host": "evil.example:9464"}).status_code == 400
    assert client(board, host="0.0.0.0").get("/metrics", headers={"Host": "gateway:9464"}).status_code == 200


def test_errors_are_problems(board: Board) -> None:
    answer = client(board).get("/live/jobs/none.json")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert "none" in answer.json()["detail"]
    assert client(board).get("/nowhere").json()["status"] == 404
    assert client(board).post("/metrics").json()["status"] == 405


def test_health_is_that_of_the_loop_and_readiness_that_of_the_data(board: Board) -> None:
    assert client(board).get("/healthz").status_code == 200
    assert client(board, silent_seconds=11).get("/healthz").status_code == 503
    assert client(board).get("/readyz").status_code == 200
    board.bus_problem = "the server is away"
    assert client(board).get("/readyz").json() == {"status": "waiting", "detail": "the server is away"}
    assert client(board).get("/healthz").status_code == 200
    board.bus_problem, board.caught_up = None, False
    assert client(board).get("/readyz").status_code == 503
