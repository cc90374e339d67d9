from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.api import Api, serving
from helpers.command_line import surefoot
from surefoot.bus.redis_bus import RedisBus
from surefoot.catalogue.database import Database
from surefoot_api.settings import ApiSettings

__all__ = ["surefoot"]


@pytest.fixture
def api(
    database_url: str, bus_url: str, database: Database, bus: RedisBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Api]:
    """An api that asks for a token, which the environment holds as for a user."""
    settings = ApiSettings.model_validate({
        "database_url": database_url, "redis_url": bus_url, "home": tmp_path / "home", "api_port": 0,
        "api_preflight": False, "api_token": "cli-test",
    })  # fmt: skip
    with serving(settings, database, bus) as running:
        running.client.headers["Authorization"] = "Bearer cli-test"
        monkeypatch.setenv("SUREFOOT_API_URL", running.url)
        monkeypatch.setenv("SUREFOOT_API_TOKEN", "cli-test")
        monkeypatch.setenv("USER", "anna")
        yield running
