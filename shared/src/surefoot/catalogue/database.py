"""Sessions on the catalogue, SQLite or PostgreSQL alike, and one error for "it does not answer"."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from surefoot.catalogue import migrate
from surefoot.catalogue.engine import make_engine, parse_url, reading, writing
from surefoot.errors import CatalogueUnavailable

_UNDEFINED_TABLE_SQLSTATE = "42P01"
_ADVICE = "run `surefoot db upgrade`"


class Database:
    """The catalogue. Connects when it is first used. Any thread; after a fork the child makes its own.

    Args:
        url: An SQLAlchemy URL, sqlite (a file) or postgresql (psycopg).

    Raises:
        UsageError: the URL cannot be understood, or psycopg is not installed.
    """

    def __init__(self, url: str) -> None:
        parsed = parse_url(url)
        self.name = parsed.render_as_string(hide_password=True)
        self._engine = make_engine(parsed)
        # Both share one pool; they differ in how a transaction begins.
        self._readers = reading(self._engine)
        self._writers = writing(self._engine)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Give a session that sees one moment of the database and cannot write. What it loaded stays readable after.

        Raises:
            CatalogueUnavailable: the database does not answer.
        """
        with self._outages(writes=False), Session(self._readers, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """Give a session that is one transaction: committed at the end, rolled back when anything is raised.

        On SQLite it holds the one write lock from its beginning (BEGIN IMMEDIATE), so what it reads stays true until
        it commits; on PostgreSQL lock the rows it depends on (`with_for_update`). Keep it short.

        Raises:
            CatalogueUnavailable: the database does not answer; where that happened at the end, the commit may have
                come through, so be ready to find it done.
        """
        with self._outages(writes=True), Session(self._writers, expire_on_commit=False) as session, session.begin():
            session.connection()  # a session begins with its first statement otherwise
            yield session

    def check_schema(self) -> None:
        """Return when the tables are those of this version.

        Raises:
            CatalogueUnavailable: they are not (yet), or the database does not answer.
        """
        with self._outages(writes=False), self._readers.connect() as connection:
            current = migrate.revision_of(connection)
        if current != (head := migrate.head()):
            found = f"at revision {current}" if current else "empty"
            raise CatalogueUnavailable(f"the database {self.name} is {found} and must be at {head}: {_ADVICE}")

    def close(self) -> None:
        """Let go of the connections."""
        self._engine.dispose()

    @contextmanager
    def _outages(self, *, writes: bool) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            problem = " ".join(str(error.orig).split())
            if _is_table_missing(error):
                raise CatalogueUnavailable(f"the database {self.name} lacks a table ({problem}): {_ADVICE}") from error
            if _is_outage(error, writes):
                raise CatalogueUnavailable(f"the database {self.name} does not answer: {problem}") from error
            raise
        except PoolTimeout as error:
            raise CatalogueUnavailable(f"the database {self.name}: all connections are busy") from error


def _is_table_missing(error: DBAPIError) -> bool:
    missing = getattr(error.orig, "sqlstate", None) == _UNDEFINED_TABLE_SQLSTATE
    return missing or (isinstance(error.orig, sqlite3.OperationalError) and "no such table" in str(error.orig))


def _is_outage(error: DBAPIError, writes: bool) -> bool:
    if error.connection_invalidated:
        return True
    if isinstance(error.orig, sqlite3.Error):
        # SQLITE_ERROR is a wrong statement; the others (BUSY, CANTOPEN, IOERR, FULL ...) are the disk's.
        name = getattr(error.orig, "sqlite_errorname", "")
        is_mistake = name == "SQLITE_ERROR" or (name == "SQLITE_READONLY" and not writes)
        return isinstance(error.orig, sqlite3.OperationalError) and not is_mistake
    return isinstance(error, OperationalError | InterfaceError)
