from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.api import Api, serving
from surefoot.bus.redis_bus import RedisBus
from surefoot.catalogue.database import Database
from surefoot_api.settings import ApiSettings


@pytest.fixture
def settings(database_url: str, bus_url: str, tmp_path: Path) -> ApiSettings:
    return ApiSettings(
        database_url=database_url, redis_url=bus_url, home=tmp_path / "home", api_port=0, api_preflight=False
    )


@pytest.fixture
def api(settings: ApiSettings, database: Database, bus: RedisBus) -> Iterator[Api]:
    """An api without a token."""
    with serving(settings, database, bus) as running:
        yield running
