"""Bring a database to the tables of this version: Alembic, driven from code, all revisions in one transaction."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from surefoot.catalogue.engine import make_engine, parse_url, writing
from surefoot.errors import CatalogueUnavailable, SurefootError

MIGRATIONS_FOLDER = Path(__file__).with_name("migrations")
_LOCK_KEY = 7_362_001
"""Of PostgreSQL's advisory lock; nobody else of ours takes one."""


@cache
def head() -> str:
    """Return the revision of this version's tables. Read from the folder once: health asks each second."""
    newest = ScriptDirectory(str(MIGRATIONS_FOLDER)).get_current_head()
    assert newest is not None, "there is a first revision"
    return newest


def revision_of(connection: Connection) -> str | None:
    """Return the revision that a database is at; None for an empty one."""
    return MigrationContext.configure(connection).get_current_revision()


def upgrade(url: str) -> bool:
    """Make the tables, or bring them to this version: all of it or nothing. Several processes may do so at once.

    Args:
        url: See `Database`. The folder of an SQLite file is made.

    Returns:
        Whether there was something to do.

    Raises:
        UsageError: the URL cannot be understood.
        CatalogueUnavailable: the database does not answer.
        SurefootError: the database was made by a newer version of Surefoot.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        Path(parsed.database or "").parent.mkdir(parents=True, exist_ok=True)
    engine = make_engine(parsed, create=True)
    try:
        with writing(engine).begin() as connection:
            return _upgrade(connection)
    except CommandError as error:
        raise SurefootError(f"{_name(parsed)} was made by a newer version of Surefoot: {error}") from error
    except DBAPIError as error:
        raise CatalogueUnavailable(f"the database {_name(parsed)} cannot be upgraded: {error.orig}") from error
    finally:
        engine.dispose()


def _upgrade(connection: Connection) -> bool:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})
    before = revision_of(connection)
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS_FOLDER).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    return before != head()


def _name(url: URL) -> str:
    return url.render_as_string(hide_password=True)
