"""Structured logs: one JSON object per line on stderr, the same keys from every service."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

KEYS = ("ts", "level", "service", "job_id", "attempt", "rank", "epoch", "step", "batch_index", "event", "error")
"""In this order, those that are known; anything else follows."""


def configure(service: str, level: str = "info") -> None:
    """Send the logs of this process, those of libraries included, to stderr as JSON lines. Once, from main.

    Args:
        service: Name of the service, in every line.
        level: debug, info, warning or error.
    """
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
        _traceback_as_error,
        _named(service),
        _in_order,
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer(default=str)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        # sys.stderr is looked up late: tests and supervisors replace it.
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(default=str),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries tell little below this that a person could use.
    root.setLevel(max(logging.getLevelNamesMapping()[level.upper()], logging.WARNING))


def _named(service: str) -> Any:
    def add_service(_: Any, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        line.setdefault("service", service)
        return line

    return add_service


def _traceback_as_error(_: Any, method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Put the traceback of `log.exception(...)` where everybody looks for what went wrong."""
    exc_info = line.pop("exc_info", None)
    if exc_info is True or (exc_info is None and method == "exception"):
        exc_info = sys.exc_info()
    if isinstance(exc_info, BaseException):
        exc_info = (type(exc_info), exc_info, exc_info.__traceback__)
    if isinstance(exc_info, tuple) and exc_info[0] is not None:
        formatter = logging.Formatter()
        line["error"] = formatter.formatException(exc_info)
    return line


def _in_order(_: Any, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {key: line[key] for key in KEYS if key in line} | {k: v for k, v in line.items() if k not in KEYS}
