"""Who may call: in front of every route, as plain ASGI, so that nothing is read of a request that is refused.

With a token: whoever sends it. Without one the api listens on loopback only, and a browser is then the one way in
from outside: a page of another site cannot set our Host (DNS rebinding) or hide its Origin, so both must be local.
"""

from __future__ import annotations

import hmac
import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from surefoot_api.audit import Audit
from surefoot_api.problems import ProblemError
from surefoot_api.settings import is_loopback

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
MAX_BODY_BYTES = 2**20
ACTOR_HEADER = "X-Surefoot-Actor"
"""Who calls, by their own account; for the audit table."""


class Guard:
    """ASGI middleware: refuses what may not come in, and has the audit write down what was refused.

    Args:
        app: The application.
        token: What callers must know; None: they must be local.
        audit: Told of every refusal.
    """

    def __init__(self, app: ASGIApp, token: str | None, audit: Audit) -> None:
        self._app = app
        self._token = token
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope.setdefault("state", {})["actor"] = self._actor(headers)
        status = 500

        async def watching(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if scope["path"] not in OPEN_PATHS:
                self._admit(headers)
            await self._app(scope, _bounded(headers, receive), watching)
        except ProblemError as error:
            await error.response()(scope, receive, watching)
        finally:
            await self._audit.answered(scope, status)

    def _actor(self, headers: Headers) -> str:
        name = headers.get(ACTOR_HEADER, "")
        if re.fullmatch(r"[A-Za-z0-9._@+-]{1,64}", name, re.ASCII):
            return name
        return "local" if self._token is None else "token"

    def _admit(self, headers: Headers) -> None:
        if self._token is None:
            _require_local(headers)
            return
        scheme, _, given = headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token.encode()):
            raise ProblemError(
                401,
                "unauthorized",
                "send the api's token: Authorization: Bearer <SUREFOOT_API_TOKEN>",
                {"WWW-Authenticate": "Bearer"},
            )


def _require_local(headers: Headers) -> None:
    host = headers.get("Host", "")
    if not _is_local(f"http://{host}"):
        raise ProblemError(
            421, "foreign_host", f"without a token the api answers to this machine's own names, not to {host!r}"
        )
    origin = headers.get("Origin")
    if origin is not None and not _is_local(origin):
        raise ProblemError(403, "foreign_origin", f"without a token the api serves no page of {origin!r}")


def _is_local(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False


def _bounded(headers: Headers, receive: Receive) -> Receive:
    """Return a `receive` that raises when a body is too long, whatever its Content-Length says."""
    if (declared := headers.get("Content-Length", "0")).isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise _too_long()
    num_bytes = 0

    async def bounded() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > MAX_BODY_BYTES:
            raise _too_long()
        return message

    return bounded


def _too_long() -> ProblemError:
    return ProblemError(413, "body_too_long", f"a request may have {MAX_BODY_BYTES} bytes")
