from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from helpers.postgres import PostgresServer, postgres_binaries, postgres_server
from surefoot.catalogue import migrate
from surefoot.catalogue.database import Database


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server with a migrated database `migrated` to copy."""
    binaries = postgres_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL on this machine")
    with postgres_server(binaries) as server:
        migrate.upgrade(server.create("migrated"))
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without tables; for SQLite not even the file is there."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'made' / 'catalogue.sqlite3'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.create(f"t{uuid4().hex}")


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    """A migrated, empty database."""
    if request.param == "sqlite":
        return str(request.getfixturevalue("database_url"))
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.create(f"t{uuid4().hex}", template="migrated")


@pytest.fixture
def catalogue(url: str) -> Iterator[Database]:
    made = Database(url)
    yield made
    made.close()
