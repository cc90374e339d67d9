"""Engines on SQLite and PostgreSQL that behave alike: when transactions begin, how long they wait."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from surefoot.errors import UsageError

BUSY_TIMEOUT_SECONDS = 5.0
"""How long a transaction waits for another one's lock."""
STATEMENT_TIMEOUT_SECONDS = 30.0
"""PostgreSQL: no statement of ours takes that long on a database that is well."""

_WRITES = "surefoot_writes"


def parse_url(url: str) -> URL:
    """Return the URL of a catalogue with its driver named and its path absolute.

    Raises:
        UsageError: it is not an SQLAlchemy URL, or of a database that Surefoot does not work with.
    """
    allowed = "give sqlite:////folder/file.sqlite3 or postgresql+psycopg://user:password@host/name"
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise UsageError("SUREFOOT_DATABASE_URL", f"is not an SQLAlchemy URL; {allowed}") from None
    if parsed.drivername in ("postgresql", "postgresql+psycopg"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername in ("sqlite", "sqlite+pysqlite"):
        if parsed.database in (None, "", ":memory:"):
            raise UsageError("SUREFOOT_DATABASE_URL", f"services share the database, so it must be a file; {allowed}")
        return parsed.set(drivername="sqlite+pysqlite", database=str(Path(parsed.database or "").absolute()))
    raise UsageError("SUREFOOT_DATABASE_URL", f"{parsed.drivername} is not supported; {allowed}")


def make_engine(url: URL, *, create: bool = False) -> Engine:
    """Return an engine; connects to nothing yet.

    Args:
        url: As of `parse_url`.
        create: SQLite: make the file where there is none. Without it a missing file is an outage.

    Raises:
        UsageError: psycopg is not installed.
    """
    pool: dict[str, Any] = {"pool_timeout": BUSY_TIMEOUT_SECONDS, "pool_pre_ping": True}
    if url.get_backend_name() == "sqlite":
        return _begin_explicitly(create_engine(url, creator=lambda: _connect_sqlite(url, create), **pool))
    settings = {
        "lock_timeout": BUSY_TIMEOUT_SECONDS,
        "statement_timeout": STATEMENT_TIMEOUT_SECONDS,
        "idle_in_transaction_session_timeout": STATEMENT_TIMEOUT_SECONDS,
    }
    arguments = {
        "connect_timeout": int(BUSY_TIMEOUT_SECONDS),
        "tcp_user_timeout": int(1000 * BUSY_TIMEOUT_SECONDS),
        "options": " ".join(f"-c {name}={int(1000 * seconds)}" for name, seconds in settings.items()),
    }
    try:
        return create_engine(url, connect_args=arguments, **pool)
    except ModuleNotFoundError:
        raise UsageError("SUREFOOT_DATABASE_URL", "needs psycopg: pip install 'surefoot[postgres]'") from None


def reading(engine: Engine) -> Engine:
    """Return the same engine with transactions that see one moment and cannot write."""
    if engine.dialect.name == "sqlite":
        return engine.execution_options(**{_WRITES: False})
    return engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)


def writing(engine: Engine) -> Engine:
    """Return the same engine with transactions that write; on SQLite they take the one write lock as they begin."""
    return engine.execution_options(**{_WRITES: True})


def _connect_sqlite(url: URL, create: bool) -> sqlite3.Connection:
    path = quote(url.database or "")
    connection = sqlite3.connect(
        f"file:{path}?mode={'rwc' if create else 'rw'}",
        uri=True,
        timeout=BUSY_TIMEOUT_SECONDS,
        isolation_level=None,  # Python's own BEGIN is deferred, and comes only before the first write
        check_same_thread=False,  # the pool hands a connection to one thread at a time
    )
    try:
        # FULL: numbers of commands are row ids, which must not be given twice after a power cut.
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {pragma}").close()
    except BaseException:
        connection.close()
        raise
    return connection


def _begin_explicitly(engine: Engine) -> Engine:
    """Begin as SQLAlchemy's page on SQLite transactions says: in a hook, since the driver leaves it to us."""

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get(_WRITES, False)
        connection.exec_driver_sql(f"PRAGMA query_only = {'OFF' if writes else 'ON'}")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine
