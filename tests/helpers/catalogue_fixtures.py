"""The catalogue for tests: migrated, empty, on SQLite.

tests/integration/conftest.py makes them known to every folder below it:
`from helpers.catalogue_fixtures import database, database_url  # noqa: F401  fixtures`.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.catalogue import migrate
from surefoot.catalogue.database import Database


@pytest.fixture
def database_url(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the URL of a migrated, empty database of this test's own."""
    path = tmp_path / "surefoot.sqlite3"
    shutil.copy(_template(tmp_path_factory.getbasetemp()), path)
    return f"sqlite:///{path}"


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """Return the database at `database_url`."""
    catalogue = Database(database_url)
    yield catalogue
    catalogue.close()


@functools.cache
def _template(folder: Path) -> Path:
    """Return a migrated file, made once per test run."""
    path = folder / "catalogue-template.sqlite3"
    migrate.upgrade(f"sqlite:///{path}")
    return path
