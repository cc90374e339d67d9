"""Where the api is put together."""

from __future__ import annotations

import structlog

from surefoot.bus.publisher import Publisher
from surefoot.bus.redis_bus import RedisBus
from surefoot.bus.streams import EVENTS
from surefoot.catalogue.database import Database
from surefoot.errors import BusUnavailable, CatalogueUnavailable, Unavailable
from surefoot.listening import listen
from surefoot.runtime import Runtime, Turn, run_service
from surefoot.settings import load_settings
from surefoot_api.app import make_app
from surefoot_api.parts import Parts
from surefoot_api.server import Server
from surefoot_api.settings import ApiSettings

NAME = "api"
TURN_SECONDS = 1.0

log = structlog.get_logger(__name__)


def main() -> int:
    """Run the api until SIGTERM; return its exit code."""
    settings = load_settings(ApiSettings)
    return run_service(NAME, settings, lambda runtime: build(runtime, settings))


def build(runtime: Runtime, settings: ApiSettings) -> Turn:
    """Make and connect the parts; return the turn, which looks whether everything answers.

    Raises:
        SurefootError: the port is in use, or the api would be open to the network without a token.
    """
    settings.check()
    listener = listen(settings.api_host, settings.api_port, "SUREFOOT_API")
    runtime.on_exit.callback(listener.close)
    database = Database(settings.database_url)
    runtime.on_exit.callback(database.close)
    bus = RedisBus(settings.redis_url)
    runtime.on_exit.callback(bus.close)
    parts = Parts(settings, database, bus, Publisher(bus, NAME), runtime.stopping)
    server = Server(make_app(parts), listener)
    runtime.on_exit.callback(server.stop)
    log.info("listening", host=settings.api_host, port=server.port, token="asked for" if settings.token else "none")
    return lambda: _turn(parts, server)


def _turn(parts: Parts, server: Server) -> None:
    server.check()
    outages = _outages(parts)
    parts.readiness.found(frozenset(outages))
    parts.stopping.wait(TURN_SECONDS)
    for outage in outages.values():
        raise outage


def _outages(parts: Parts) -> dict[str, Unavailable]:
    outages: dict[str, Unavailable] = {}
    try:
        parts.database.check_schema()
    except CatalogueUnavailable as error:
        outages["database"] = error
    try:
        parts.bus.read(EVENTS, "$", 1, 0.0)
    except BusUnavailable as error:
        outages["bus"] = error
    return outages
