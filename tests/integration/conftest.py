"""What integration tests stand on: a real server and a real database, empty for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.catalogue_fixtures import database, database_url
from helpers.forked import Forge
from helpers.server import RealServer
from surefoot.bus.redis_bus import RedisBus

__all__ = ["bus", "bus_url", "database", "database_url", "make_server"]


@pytest.fixture(scope="session")
def _shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    server = RealServer(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.close()


@pytest.fixture(scope="session")
def toy_forge() -> Iterator[Forge]:
    """Where the processes of toy jobs (`helpers.toy_history`) are forked; importing torch once takes seconds."""
    with Forge("helpers.toy_job") as forge:
        yield forge


@pytest.fixture
def bus_url(_shared_server: RealServer) -> str:
    """A server that holds nothing. It is shared: who kills servers makes their own, by `make_server`."""
    _shared_server.client.flushall()
    return _shared_server.url


@pytest.fixture
def bus(bus_url: str) -> Iterator[RedisBus]:
    made = RedisBus(bus_url)
    yield made
    made.close()


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[[], RealServer]]:
    """Make servers of the test's own, to be killed, paused and restarted."""
    made: list[RealServer] = []

    def make() -> RealServer:
        made.append(RealServer(tmp_path / f"server-{len(made)}").start())
        return made[-1]

    yield make
    for server in made:
        server.close()
