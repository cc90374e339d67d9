"""The HTTP server on a thread of its own: the main thread belongs to the loop, whose health is told."""

from __future__ import annotations

import socket
import threading

import uvicorn
from starlette.applications import Starlette

GRACE_SECONDS = 3
"""Requests that are running at the end get this long."""


class WebServer:
    """Serves an application from `start` to `stop`.

    Args:
        app: What is served.
        listener: Its socket, which listens; closed at the end.
    """

    def __init__(self, app: Starlette, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
            limit_concurrency=200,
        )
        self._server = uvicorn.Server(config)
        self._listener = listener
        self._thread = threading.Thread(target=self._run, name="web-server", daemon=True)

    @property
    def is_running(self) -> bool:
        """Whether its thread lives."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start it. Connections have been accepted since its socket listens, and are answered in a moment."""
        self._thread.start()

    def stop(self) -> None:
        """Finish what is running, at most `GRACE_SECONDS`, and end."""
        self._server.should_exit = True
        self._thread.join(GRACE_SECONDS + 2)

    def _run(self) -> None:
        self._server.run(sockets=[self._listener])
