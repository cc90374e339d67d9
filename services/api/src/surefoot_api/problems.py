"""Errors as clients see them: `application/problem+json` (RFC 9457) with an `error_code` for programs."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from surefoot.errors import BusUnavailable, Unavailable, UsageError

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_SECONDS = 2

log = structlog.get_logger(__name__)


class ProblemError(HTTPException):
    """An answer that is not what the client hoped for.

    Args:
        status: HTTP status.
        code: For programs, snake_case, never changed once it is out.
        detail: For people: what is wrong with this request and what would be right.
        headers: Of the response.
        fields: Further members of the problem object.
    """

    def __init__(
        self, status: int, code: str, detail: str, headers: dict[str, str] | None = None, **fields: Any
    ) -> None:
        super().__init__(status, detail, headers)
        self.code = code
        self.fields = fields

    def response(self) -> JSONResponse:
        """Return it as a response."""
        return problem(self.status_code, self.code, self.detail, self.headers, **self.fields)


def problem(status: int, code: str, detail: str, headers: Any = None, **fields: Any) -> JSONResponse:
    """Return a problem object as a response."""
    body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
    return JSONResponse(body | {"error_code": code} | fields, status, headers, MEDIA_TYPE)


def not_found(what: str, name: object) -> ProblemError:
    """Return the error for something that is not in the catalogue."""
    return ProblemError(404, f"{what}_not_found", f"there is no {what} {name!r}")


def unavailable(error: Unavailable) -> JSONResponse:
    """Return 503 with when to come again."""
    code = "bus_unavailable" if isinstance(error, BusUnavailable) else "catalogue_unavailable"
    return problem(503, code, str(error), {"Retry-After": str(RETRY_AFTER_SECONDS)})


def install(app: FastAPI) -> None:
    """Make every error that leaves the application a problem object."""
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(UsageError, _usage)
    app.add_exception_handler(Unavailable, _unavailable)
    app.add_exception_handler(Exception, _unexpected)


async def _http(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, ProblemError):
        return error.response()
    assert isinstance(error, HTTPException)
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    return problem(error.status_code, code, f"{request.method} {request.url.path}: {error.detail}", error.headers)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    del request
    assert isinstance(error, RequestValidationError)
    errors = [{"where": ".".join(map(str, item["loc"])), "problem": item["msg"]} for item in error.errors()]
    first = f"{errors[0]['where']}: {errors[0]['problem']}" if errors else "the request is not valid"
    return problem(422, "invalid_request", first, errors=errors)


async def _usage(request: Request, error: Exception) -> JSONResponse:
    del request
    assert isinstance(error, UsageError)
    return problem(422, "invalid_spec", str(error), key=error.key)


async def _unavailable(request: Request, error: Exception) -> JSONResponse:
    del request
    assert isinstance(error, Unavailable)
    return unavailable(error)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    # Starlette raises it again after this answer, and uvicorn logs the traceback.
    log.error("a request failed", method=request.method, path=request.url.path, error=repr(error))
    return problem(500, "internal_error", "the api failed; its log says why")
