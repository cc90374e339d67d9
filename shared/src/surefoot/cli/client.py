"""A client of the api: finds it, speaks its JSON, and turns its problem objects into errors for people.

Imported only by commands that call the api: httpx is not there in a training environment.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote, urlsplit
from uuid import uuid4

import httpx

from surefoot.embedded.stack_file import running_stack
from surefoot.errors import EXIT_FAILED, EXIT_USAGE, SurefootError, UsageError

URL_ENVIRONMENT_KEY = "SUREFOOT_API_URL"
TOKEN_ENVIRONMENT_KEY = "SUREFOOT_API_TOKEN"  # noqa: S105  the name of a variable
ANSWER_SECONDS = 30.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ApiUnreachable(SurefootError):
    """Nobody answers, or something outside of the api does not: what was asked may be asked again."""


class ApiRefused(SurefootError):
    """The api says no.

    Args:
        status: HTTP status.
        code: Its error_code.
        detail: Its words.
    """

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.exit_code = EXIT_USAGE if status in (413, 422) else EXIT_FAILED


def connect(home: Path) -> ApiClient:
    """Return a client of the api that SUREFOOT_API_URL names, or else of the stack that runs in `home`.

    Raises:
        ApiUnreachable: no stack runs there.
    """
    token = os.environ.get(TOKEN_ENVIRONMENT_KEY)
    if url := os.environ.get(URL_ENVIRONMENT_KEY):
        if urlsplit(url).scheme not in ("http", "https"):
            raise UsageError(URL_ENVIRONMENT_KEY, f"is {url!r}; give http://host:port")
        return ApiClient(url, token)
    stack = running_stack(home)
    if stack is None or "api" not in stack.urls:
        raise ApiUnreachable(
            f"no stack runs in {home.absolute()}: start one with `surefoot up`, name its folder with --home, "
            f"or set {URL_ENVIRONMENT_KEY}"
        )
    return ApiClient(stack.urls["api"], token or stack.token)


class ApiClient:
    """Calls the api. One thread, but for `stream`, which may have others.

    Args:
        url: `http://host:port`.
        token: What it asks for; None: nothing.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/api/v1")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        with suppress(OSError, KeyError):  # a container's user may have no name
            headers["X-Surefoot-Actor"] = os.environ.get("USER") or getpass.getuser()
        self._http = httpx.Client(
            base_url=f"{self.url}/api/v1/",
            headers={name: value for name, value in headers.items() if value.isascii() and value},
            timeout=ANSWER_SECONDS,
            # A proxy for the web is none for this machine.
            trust_env=urlsplit(self.url).hostname not in _LOOPBACK,
        )

    def __enter__(self) -> ApiClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._http.close()

    def get(self, *path: str | int, **params: str | int) -> dict[str, Any]:
        """Return what is at a path below /api/v1.

        Raises:
            ApiUnreachable: nobody answers.
            ApiRefused: it says no.
        """
        return self._call("GET", path, params=params)

    def post(self, *path: str | int, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask for something, once however often the network makes it arrive.

        Raises:
            ApiUnreachable: nobody answers.
            ApiRefused: it says no.
        """
        return self._call("POST", path, json=body or {}, headers={"Idempotency-Key": uuid4().hex})

    def list(self, name: str, *path: str | int, limit: int | None = None) -> list[dict[str, Any]]:
        """Return the rows of a list, all pages or up to `limit` rows."""
        return list(self._rows(name, path, limit))

    def stream(self, *path: str | int, params: dict[str, str], last_event_id: str | None) -> httpx.Response:
        """Open a stream of Server-Sent Events; the caller closes it.

        Raises:
            ApiUnreachable: nobody answers.
            ApiRefused: it says no.
        """
        headers = {"Last-Event-ID": last_event_id} if last_event_id else {}
        request = self._http.build_request("GET", _joined(path), params=params, headers=headers)
        try:
            response = self._http.send(request, stream=True)
            if response.is_error:
                response.read()
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        _raise_for_problem(response)
        return response

    def _rows(self, name: str, path: tuple[str | int, ...], limit: int | None) -> Iterator[dict[str, Any]]:
        params: dict[str, str | int] = {"max_results": min(limit or 1000, 1000)}
        num_left = limit
        while True:
            page = self.get(*path, **params)
            rows = page[name] if num_left is None else page[name][:num_left]
            yield from rows
            num_left = None if num_left is None else num_left - len(rows)
            if page["next_page_token"] is None or num_left == 0:
                return
            params["page_token"] = page["next_page_token"]

    def _call(self, method: str, path: tuple[str | int, ...], **keywords: Any) -> dict[str, Any]:
        try:
            response = self._http.request(method, _joined(path), **keywords)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        _raise_for_problem(response)
        answer: dict[str, Any] = response.json()
        return answer

    def _unreachable(self, error: Exception) -> ApiUnreachable:
        return ApiUnreachable(f"the api at {self.url} does not answer ({error}); see `surefoot status`")


def _joined(path: tuple[str | int, ...]) -> str:
    return "/".join(quote(str(part), safe="") for part in path)


def _raise_for_problem(response: httpx.Response) -> None:
    if not response.is_error:
        return
    try:
        problem = response.json()
        code, detail = problem["error_code"], problem["detail"]
    except (ValueError, KeyError, TypeError):
        code, detail = "unknown", f"{response.url} answered {response.status_code}: is that Surefoot's api?"
    if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        raise ApiUnreachable(f"{detail}; try again in a moment")
    raise ApiRefused(response.status_code, code, detail)
