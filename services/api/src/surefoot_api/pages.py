"""Lists in pages, by key and not by offset: rows that come or go meanwhile shift nothing."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, Query
from sqlalchemy import Select, literal, tuple_
from sqlalchemy.orm import InstrumentedAttribute, Session

from surefoot.catalogue.models import UtcDateTime
from surefoot_api.problems import ProblemError

MAX_RESULTS = 1000


class PageRequest(NamedTuple):
    """Which part of a list a client wants.

    Attributes:
        max_results: At most so many rows.
        page_token: `next_page_token` of the page before; None: the first page.
    """

    max_results: int
    page_token: str | None


def _page_request(
    max_results: Annotated[int, Query(ge=1, le=MAX_RESULTS)] = 100, page_token: str | None = None
) -> PageRequest:
    return PageRequest(max_results, page_token)


Paging = Annotated[PageRequest, Depends(_page_request)]


def page(
    session: Session, query: Select[Any], keys: Sequence[InstrumentedAttribute[Any]], request: PageRequest
) -> tuple[list[Any], str | None]:
    """Return one page of a query's rows, highest key first, and the token of the next page.

    Args:
        session: To read with.
        query: Selects entities, unordered.
        keys: Columns that together are unique; the order is by them, descending.
        request: Which page.

    Raises:
        ProblemError: the token is not one of ours.
    """
    if request.page_token is not None:
        values = _decode(request.page_token, keys)
        columns = [literal(value, key.type) for value, key in zip(values, keys, strict=True)]
        query = query.where(tuple_(*keys) < tuple_(*columns))
    query = query.order_by(*(key.desc() for key in keys)).limit(request.max_results + 1)
    rows = list(session.scalars(query))
    if len(rows) <= request.max_results:
        return rows, None
    rows.pop()
    return rows, _encode([getattr(rows[-1], key.key) for key in keys])


def _encode(values: Sequence[Any]) -> str:
    plain = [value.isoformat() if isinstance(value, datetime) else value for value in values]
    return base64.urlsafe_b64encode(json.dumps(plain).encode()).decode()


def _decode(token: str, keys: Sequence[InstrumentedAttribute[Any]]) -> list[Any]:
    try:
        plain = json.loads(base64.urlsafe_b64decode(token.encode()))
        return [_value(item, _kind(key)) for item, key in zip(plain, keys, strict=True)]
    except (ValueError, TypeError):
        raise ProblemError(
            422, "invalid_page_token", "page_token: give next_page_token of the page before, unchanged"
        ) from None


def _kind(key: InstrumentedAttribute[Any]) -> type:
    return datetime if isinstance(key.type, UtcDateTime) else key.type.python_type


def _value(item: object, kind: type) -> object:
    # The database must never see what is not of the column's type.
    if kind is datetime and isinstance(item, str) and (moment := datetime.fromisoformat(item)).tzinfo is not None:
        return moment
    if kind is str and isinstance(item, str) and item.isprintable():
        return item
    if kind is int and type(item) is int and abs(item) < 2**63:
        return item
    raise ValueError("not written by us")
