"""The HTTP server in a thread of its own; the main thread keeps the service's health and its signals."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import threading
import time

import structlog
import uvicorn
from starlette.types import ASGIApp

from surefoot.errors import SurefootError

GRACE_SECONDS = 3.0
"""Requests that are still running are cut off after this; streams end by themselves within a second."""
JOIN_SECONDS = 8.0
ANSWER_SECONDS = 3.0
MAX_STUCK_SECONDS = 30.0
"""An event loop that does not come round for so long is stuck; a busy one is late, and answers when it can."""

log = structlog.get_logger(__name__)


class _Uvicorn(uvicorn.Server):
    """Notes when its event loop comes round, ten times a second when it has nothing else to do."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ticked_seconds = time.monotonic()

    async def on_tick(self, counter: int) -> bool:
        self.ticked_seconds = time.monotonic()
        return await super().on_tick(counter)


class Server:
    """Serves an application on a socket until it is stopped. Main thread only.

    Args:
        app: The application.
        listener: Its socket; closed at the end.
    """

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        host, self.port = listener.getsockname()[:2]
        # Whoever listens on every address is reached on loopback.
        self._probe_host = "127.0.0.1" if ipaddress.ip_address(host).is_unspecified else host
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=int(GRACE_SECONDS),
        )
        self._server = _Uvicorn(config)
        self._well_seconds = time.monotonic()
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, name="surefoot-http", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Ask it something.

        Raises:
            SurefootError: its event loop is stuck, or nobody listens any more; nothing but a new process helps.
        """
        problem = self._problem()
        if problem is not None:
            log.warning("the HTTP server does not answer", error=repr(problem), port=self.port)
        if not isinstance(problem, ConnectionRefusedError):
            # Without an answer, but with a loop that comes round, it has too much to do: that passes.
            self._well_seconds = time.monotonic() if problem is None else self._server.ticked_seconds
        if time.monotonic() - self._well_seconds > MAX_STUCK_SECONDS or not self._thread.is_alive():
            raise SurefootError(f"the HTTP server on port {self.port} does not answer any more: {problem!r}")

    def _problem(self) -> Exception | None:
        connection = http.client.HTTPConnection(self._probe_host, self.port, timeout=ANSWER_SECONDS)
        try:
            connection.request("GET", "/healthz")
            connection.getresponse().read()
        except (OSError, http.client.HTTPException) as error:
            return error
        finally:
            connection.close()
        return None

    def stop(self) -> None:
        """Let running requests finish, for a while, and end."""
        self._server.should_exit = True
        self._thread.join(JOIN_SECONDS)
