"""What is served: the page, its JSON, /metrics, and how the service is."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import re
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from surefoot.telemetry.health import STALE_SECONDS
from surefoot_gateway import snapshot
from surefoot_gateway.board import Board

MIN_REBUILD_SECONDS = 0.4
"""One answer serves all who ask within this time: a page asks once a second."""


class Web:
    """The handlers of requests. All run on the web server's thread and hold the board's lock for milliseconds.

    Args:
        board: What is shown.
        silent_seconds: Says how long the reader's loop has not come round.
    """

    def __init__(self, board: Board, silent_seconds: Callable[[], float]) -> None:
        self._board = board
        self._silent_seconds = silent_seconds
        self._page = files("surefoot_gateway").joinpath("page.html").read_bytes()
        self._page_headers = _headers_of(self._page)
        # Distinguishes the revisions of this process from those of the one before.
        self._life = f"{time.time_ns():x}"
        self._answers: dict[str, tuple[int, float, bytes]] = {}

    def app(self, host: str) -> Starlette:
        """Return the application.

        Args:
            host: Address that it listens on. On loopback only requests for this machine are answered, so that a page
                elsewhere cannot reach it through a name that resolves to 127.0.0.1 (DNS rebinding).
        """
        routes = [
            Route("/", self._get_page),
            Route("/metrics", self._get_metrics),
            Route("/live/jobs.json", self._get_jobs),
            Route("/live/jobs/{job}.json", self._get_job),
            Route("/healthz", self._get_health),
            Route("/readyz", self._get_readiness),
        ]
        local = Middleware(TrustedHostMiddleware, allowed_hosts=["localhost", "127.0.0.1", host], www_redirect=False)
        return Starlette(
            routes=routes,
            middleware=[local] if _is_loopback(host) else [],
            exception_handlers={HTTPException: _problem},
        )

    async def _get_page(self, request: Request) -> Response:
        del request
        return Response(self._page, media_type="text/html", headers=self._page_headers)

    async def _get_metrics(self, request: Request) -> Response:
        body, content_type = self._board.render_metrics(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    async def _get_jobs(self, request: Request) -> Response:
        del request
        with self._board.lock:
            content = snapshot.jobs_json(self._board, time.time())
        return _json(_encode(content))

    async def _get_job(self, request: Request) -> Response:
        name = request.path_params["job"]
        with self._board.lock:
            job = self._board.jobs.get(name)
            if job is None:
                raise HTTPException(404, f"no job named {name} is known here")
            now = time.monotonic()
            revision, made, body = self._answers.get(name, (-1, 0.0, b""))
            content = None
            if revision != job.view.revision and now - made >= MIN_REBUILD_SECONDS:
                revision, content = job.view.revision, snapshot.job_json(job.view)
                for gone in self._answers.keys() - self._board.jobs.keys():
                    del self._answers[gone]
        if content is not None:
            body = _encode(content)
            self._answers[name] = (revision, now, body)
        etag = f'"{self._life}-{revision}"'
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers={"ETag": etag})
        return _json(body, {"ETag": etag})

    async def _get_health(self, request: Request) -> Response:
        """Answer 200 as long as the reader's loop comes round, with the bus away too: a restart would not help."""
        del request
        silent = self._silent_seconds()
        if silent > STALE_SECONDS:
            return JSONResponse({"status": "stale", "detail": f"the loop has not come round for {silent:.0f} s"}, 503)
        return JSONResponse({"status": "ok"})

    async def _get_readiness(self, request: Request) -> Response:
        """Answer 200 when what is served is complete and current."""
        del request
        with self._board.lock:
            problem, caught_up = self._board.bus_problem, self._board.caught_up
        if problem is not None:
            return JSONResponse({"status": "waiting", "detail": problem}, 503)
        if not caught_up:
            return JSONResponse({"status": "starting", "detail": "the stream is being read from its beginning"}, 503)
        return JSONResponse({"status": "ok"})


def _json(body: bytes, headers: dict[str, str] | None = None) -> Response:
    # no-cache: keep it, but ask each time whether it is still the same.
    return Response(body, media_type="application/json", headers={"Cache-Control": "no-cache"} | (headers or {}))


def _encode(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


async def _problem(request: Request, error: Exception) -> Response:
    """Return an error as RFC 9457 says."""
    del request
    assert isinstance(error, HTTPException)
    title = {404: "Not Found", 405: "Method Not Allowed"}.get(error.status_code, "Error")
    content = {"type": "about:blank", "title": title, "status": error.status_code, "detail": error.detail}
    return JSONResponse(content, error.status_code, error.headers, media_type="application/problem+json")


def _headers_of(page: bytes) -> dict[str, str]:
    """Allow the page its own script and style, requests to where it came from, and nothing else."""
    script, style = (_hash_of(tag, page) for tag in (b"script", b"style"))
    policy = f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:"
    return {
        "Content-Security-Policy": f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _hash_of(tag: bytes, page: bytes) -> str:
    match = re.search(b"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
    assert match is not None, "the page has one script and one style"
    return f"'sha256-{base64.b64encode(hashlib.sha256(match[1]).digest()).decode()}'"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
