"""Who may call, what refusals look like, and that they are written down."""

from __future__ import annotations

import pytest
from pydantic import SecretStr
from sqlalchemy import select

from helpers.api import Api, serving
from helpers.waiting import wait_until
from surefoot.bus.redis_bus import RedisBus
from surefoot.catalogue.database import Database
from surefoot.catalogue.models import AuditEntry
from surefoot.errors import UsageError
from surefoot_api.guard import MAX_BODY_BYTES
from surefoot_api.problems import MEDIA_TYPE
from surefoot_api.settings import ApiSettings

TOKEN = "t0ken-of-this-test"


def audited(api: Api) -> list[tuple[str, int]]:
    """Return the rows so far; a refusal gets its own only after the answer."""
    with api.database.read() as session:
        return [(row.actor, row.status) for row in session.scalars(select(AuditEntry).order_by(AuditEntry.id))]


def test_with_a_token_nothing_but_health_answers_without_it(
    settings: ApiSettings, database: Database, bus: RedisBus
) -> None:
    settings.api_token = SecretStr(TOKEN)
    with serving(settings, database, bus) as api:
        for given in ("", TOKEN, "Bearer x", "Basic é"):
            headers = {"Authorization": given.encode()} if given else {}
            for path in ("/api/v1/jobs", "/api/v1/openapi.json", "/nonsense", "/api/v1/jobs/j/events"):
                answer = api.client.get(path, headers=headers)
                assert (answer.status_code, answer.json()["error_code"]) == (401, "unauthorized")
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert api.client.get("/healthz").json()["status"] == "ok"
        assert api.client.get("/readyz").status_code == 200
        known = {"Authorization": f"bearer {TOKEN}", "Host": "surefoot.example.com", "Origin": "https://example.com"}
        assert api.client.get("/api/v1/jobs", headers=known).status_code == 200
        wait_until(lambda: audited(api), 10, "a refusal is written down")
        assert set(audited(api)) == {("unknown", 401)}


def test_who_guesses_tokens_does_not_fill_the_disk(
    settings: ApiSettings, database: Database, bus: RedisBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot_api.audit.UNAUTHORISED_PER_MINUTE", 3)
    settings.api_token = SecretStr(TOKEN)
    with serving(settings, database, bus) as api:
        for _ in range(8):
            assert api.client.get("/api/v1/jobs").status_code == 401
        wait_until(lambda: len(audited(api)) >= 3, 10, "the first refusals are written down")
    assert len(audited(api)) <= 6  # a minute may end in between; the server has ended, so no more come


def test_without_a_token_pages_of_other_sites_get_nothing(api: Api) -> None:
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:8470", "[::1]:8470"):
        assert api.client.get("/api/v1/jobs", headers={"Host": host}).status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8470", "[", "0.0.0.0"):
        answer = api.client.get("/api/v1/jobs", headers={"Host": host})
        assert (answer.status_code, answer.json()["error_code"]) == (421, "foreign_host")
    for origin in ("https://evil.example", "null", "file://"):
        answer = api.client.post("/api/v1/jobs/j/stop", headers={"Origin": origin})
        assert (answer.status_code, answer.json()["error_code"]) == (403, "foreign_origin")
    own = api.client.get("/api/v1/jobs", headers={"Origin": "http://localhost:9464"})
    assert own.status_code == 200
    wait_until(lambda: len(audited(api)) == 8, 10, "every refusal is written down")
    assert sorted(status for _, status in audited(api)) == [403] * 3 + [421] * 5


def test_every_error_is_a_problem_object(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.add_job("j")
    post = {"Content-Type": "application/json"}
    calls = [
        (api.client.get("/nonsense"), 404, "not_found"),
        (api.client.get("/api/v1/jobs/nobody"), 404, "job_not_found"),
        (api.client.get("/api/v1/operations/abc"), 404, "operation_not_found"),
        (api.client.delete("/api/v1/jobs"), 405, "method_not_allowed"),
        (api.client.post("/api/v1/jobs", content="{", headers=post), 422, "invalid_request"),
        (api.client.post("/api/v1/jobs", json=[]), 422, "invalid_request"),
        (api.client.get("/api/v1/jobs/%00"), 422, "invalid_request"),
        (api.client.get("/api/v1/incidents/99999999999999999999"), 422, "invalid_request"),
        (api.client.post("/api/v1/jobs", content=b"x" * (MAX_BODY_BYTES + 1), headers=post), 413, "body_too_long"),
        (api.client.post("/api/v1/jobs", content=iter([b"x" * 2**19] * 3), headers=post), 413, "body_too_long"),
    ]
    for answer, status, code in calls:
        body = answer.json()
        assert (answer.status_code, body["status"], body["error_code"]) == (status, status, code)
        assert answer.headers["Content-Type"] == MEDIA_TYPE
        assert {"type", "title", "detail"} <= set(body)
    assert calls[3][0].headers["Allow"]
    monkeypatch.setattr("surefoot_api.reading.job_detail", lambda session, name: 1 / 0)
    answer = api.client.get("/api/v1/jobs/j")
    assert (answer.status_code, answer.json()["error_code"]) == (500, "internal_error")
    assert "ZeroDivisionError" not in answer.text


def test_not_ready_names_what_is_away(api: Api) -> None:
    api.parts.readiness.found(frozenset({"bus"}))
    answer = api.client.get("/readyz")
    assert (answer.status_code, answer.json()["away"]) == (503, ["bus"])
    assert api.client.get("/healthz").status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "surefoot.example.com", ""])
def test_without_a_token_other_addresses_are_refused(host: str) -> None:
    with pytest.raises(UsageError, match="SUREFOOT_API_TOKEN"):
        ApiSettings(api_host=host).check()
    ApiSettings(api_host=host, api_token=SecretStr(TOKEN)).check()


def test_a_token_that_cannot_be_sent_is_refused() -> None:
    for token in ("two words", "é", "a\n"):
        with pytest.raises(UsageError, match="SUREFOOT_API_TOKEN"):
            ApiSettings(api_token=SecretStr(token)).check()
    for host in ("127.0.0.1", "::1", "localhost"):
        ApiSettings(api_host=host).check()
