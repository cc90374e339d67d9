"""Build and connect the gateway."""

from __future__ import annotations

import structlog

from surefoot.bus.redis_bus import RedisBus
from surefoot.errors import SurefootError
from surefoot.listening import listen
from surefoot.runtime import Runtime, Turn, run_service
from surefoot.settings import load_settings
from surefoot_gateway.board import Board
from surefoot_gateway.handlers import HANDLERS
from surefoot_gateway.reader import StreamReader
from surefoot_gateway.server import WebServer
from surefoot_gateway.settings import GatewaySettings
from surefoot_gateway.web import Web

NAME = "gateway"

log = structlog.get_logger(__name__)


def main() -> int:
    """Run the service; return its exit code."""
    settings = load_settings(GatewaySettings)

    def build(runtime: Runtime) -> Turn:
        listener = listen(settings.gateway_host, settings.gateway_port, "SUREFOOT_GATEWAY")
        runtime.on_exit.callback(listener.close)
        board = Board(settings.gateway_max_jobs)
        bus = RedisBus(settings.redis_url)
        runtime.on_exit.callback(bus.close)
        reader = StreamReader(bus, board, HANDLERS, runtime.stopping)
        server = WebServer(Web(board, lambda: reader.silent_seconds).app(settings.gateway_host), listener)
        runtime.on_exit.callback(server.stop)
        server.start()
        log.info("serving", url="http://{}:{}/".format(*listener.getsockname()[:2]))

        def turn() -> None:
            if not server.is_running:
                raise SurefootError("the HTTP server has ended")
            reader.turn()

        return turn

    return run_service(NAME, settings, build)
