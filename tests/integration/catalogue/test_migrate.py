from __future__ import annotations

from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import text

from helpers.together import call_together
from surefoot.catalogue import migrate
from surefoot.catalogue.database import Database
from surefoot.catalogue.engine import make_engine, parse_url, writing
from surefoot.catalogue.models import Base
from surefoot.errors import CatalogueUnavailable, SurefootError


def test_the_migrations_make_exactly_the_tables_of_the_models(url: str) -> None:
    engine = make_engine(parse_url(url))
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_a_second_upgrade_has_nothing_to_do(empty_url: str) -> None:
    assert migrate.upgrade(empty_url) is True
    assert migrate.upgrade(empty_url) is False


def test_several_processes_may_upgrade_at_once(empty_url: str) -> None:
    assert sorted(call_together(3, migrate.upgrade, empty_url)) == [False, False, True]


def test_an_upgrade_that_fails_leaves_nothing_behind(empty_url: str) -> None:
    engine = make_engine(parse_url(empty_url), create=True)
    if engine.dialect.name == "sqlite":
        Path(parse_url(empty_url).database or "").parent.mkdir()
    with writing(engine).begin() as connection:
        connection.execute(text("CREATE TABLE incidents (id INTEGER)"))  # in the way of the one in the middle

    with pytest.raises(CatalogueUnavailable, match="incidents"):
        migrate.upgrade(empty_url)

    with engine.connect() as connection:
        assert migrate.revision_of(connection) is None
        tables = engine.dialect.get_table_names(connection)
    engine.dispose()
    assert tables == ["incidents"]


def test_a_database_that_is_not_upgraded_is_named_with_what_to_do(url: str) -> None:
    catalogue = Database(url)
    catalogue.check_schema()
    with catalogue.write() as session:
        session.execute(text("DELETE FROM alembic_version"))

    with pytest.raises(CatalogueUnavailable, match=r"is empty and must be at .*surefoot db upgrade"):
        catalogue.check_schema()
    catalogue.close()


def test_a_database_of_a_newer_version_is_left_alone(url: str) -> None:
    catalogue = Database(url)
    with catalogue.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))

    with pytest.raises(SurefootError, match="newer version"):
        migrate.upgrade(url)
    with pytest.raises(CatalogueUnavailable, match="at revision 9999"):
        catalogue.check_schema()
    catalogue.close()
