from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from sqlalchemy import delete, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, StatementError

from helpers.postgres import PostgresServer
from helpers.rows import NOW, job_row, started_attempt
from helpers.together import call_together
from surefoot.catalogue import migrate
from surefoot.catalogue.database import Database
from surefoot.catalogue.models import Action, Job, Run
from surefoot.errors import CatalogueUnavailable, UsageError


def count_up(url: str) -> None:
    catalogue = Database(url)
    for _ in range(50):
        with catalogue.write() as session:
            session.get_one(Run, "demo", with_for_update=True).lease_version += 1
    catalogue.close()


def test_times_come_back_in_utc_whatever_zone_they_were_in(catalogue: Database) -> None:
    given = datetime(2026, 3, 29, 2, 30, 0, 123456, tzinfo=timezone(timedelta(hours=-7)))
    with catalogue.write() as session:
        session.add(job_row(created_at=given))

    with catalogue.read() as session:
        read = session.get_one(Job, "demo").created_at

    assert read == given
    assert read.tzinfo == UTC


def test_a_time_without_zone_is_refused(catalogue: Database) -> None:
    with pytest.raises(StatementError, match="without time zone"), catalogue.write() as session:
        session.add(job_row(created_at=datetime(2026, 1, 1)))


def test_two_processes_that_write_at_once_lose_nothing(catalogue: Database, url: str) -> None:
    with catalogue.write() as session:
        session.add(job_row())
        session.flush()
        session.add(Run(job="demo", generation=1, state="RUNNING", updated_at=NOW))
    call_together(2, count_up, url)

    with catalogue.read() as session:
        assert session.scalar(text("SELECT lease_version FROM runs")) == 100


def test_what_is_raised_rolls_back(catalogue: Database) -> None:
    def fail() -> None:
        with catalogue.write() as session:
            session.add(job_row())
            session.flush()
            raise KeyError

    with pytest.raises(KeyError):
        fail()

    with catalogue.read() as session:
        assert session.get(Job, "demo") is None


def test_a_reader_sees_one_moment_and_is_not_in_the_way_of_a_writer(catalogue: Database) -> None:
    with catalogue.read() as reader:
        assert reader.scalars(select(Job)).all() == []
        with catalogue.write() as writer:
            writer.add(job_row())
        assert reader.scalars(select(Job)).all() == []
    with catalogue.read() as reader:
        assert len(reader.scalars(select(Job)).all()) == 1


def test_a_reader_cannot_write_and_that_is_no_outage(catalogue: Database) -> None:
    with pytest.raises(DBAPIError), catalogue.read() as session:
        session.execute(delete(Job))

    with catalogue.write() as session:  # the pool's connection is fit to write again
        session.add(job_row())


def test_rows_stay_readable_after_their_session(catalogue: Database) -> None:
    with catalogue.write() as session:
        job = job_row()
        session.add(job)

    assert job.generation == 1


def test_what_refers_to_nothing_and_what_comes_twice_is_refused(catalogue: Database) -> None:
    with pytest.raises(IntegrityError), catalogue.write() as session:
        session.add(started_attempt(1, job="unknown"))
    with catalogue.write() as session:
        session.add(job_row())
    with pytest.raises(IntegrityError), catalogue.write() as session:
        session.add(job_row())


def test_numbers_of_actions_rise_and_no_command_is_null(catalogue: Database) -> None:
    with catalogue.write() as session:
        session.add(job_row())
        session.flush()
        for _ in range(3):
            session.add(Action(job="demo", attempt=1, kind="none", reason="r", state="PENDING", created_at=NOW))

    with catalogue.read() as session:
        rows = session.scalars(select(Action).where(Action.command.is_(None)).order_by(Action.id)).all()
    assert [row.id for row in rows] == [1, 2, 3]


def test_a_wrong_statement_is_no_outage(catalogue: Database) -> None:
    with pytest.raises(DBAPIError) as caught, catalogue.read() as session:
        session.execute(text("SELECT no_such_column FROM jobs"))
    assert "no_such_column" in str(caught.value)


def test_missing_tables_are_an_outage_that_says_what_to_do(url: str) -> None:
    catalogue = Database(url)
    with catalogue.write() as session:
        session.execute(text("DROP TABLE audit"))

    with pytest.raises(CatalogueUnavailable, match="surefoot db upgrade"), catalogue.read() as session:
        session.execute(text("SELECT * FROM audit"))
    catalogue.close()


def test_a_writer_that_waits_too_long_is_an_outage(monkeypatch: pytest.MonkeyPatch, database_url: str) -> None:
    monkeypatch.setattr("surefoot.catalogue.engine.BUSY_TIMEOUT_SECONDS", 0.05)
    first, hurried = Database(database_url), Database(database_url)
    with first.write(), pytest.raises(CatalogueUnavailable, match="locked"), hurried.write():
        pass
    with hurried.write() as session:
        session.add(job_row())
    first.close()
    hurried.close()


def test_threads_share_a_database(catalogue: Database) -> None:
    with catalogue.write() as session:
        session.add(job_row())

    def add(number: int) -> None:
        for attempt in range(number * 10 + 1, number * 10 + 11):
            with catalogue.write() as session:
                session.add(started_attempt(attempt))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    with catalogue.read() as session:
        assert session.scalar(text("SELECT count(*) FROM attempts")) == 40


def test_a_file_that_went_away_is_an_outage_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.sqlite3"
    migrate.upgrade(f"sqlite:///{path}")
    path.rename(tmp_path / "away")
    catalogue = Database(f"sqlite:///{path}")
    with pytest.raises(CatalogueUnavailable, match="unable to open"), catalogue.read() as session:
        session.get(Job, "demo")
    assert not path.exists()

    (tmp_path / "away").rename(path)
    with catalogue.read() as session:
        assert session.get(Job, "demo") is None
    catalogue.close()


def test_a_server_that_stops_is_an_outage_and_one_that_is_back_is_used_again(postgres: PostgresServer) -> None:
    migrate.upgrade(url := postgres.create("outage"))
    catalogue = Database(url)
    catalogue.check_schema()

    def stop_in_the_middle() -> None:
        with catalogue.write() as session:
            session.add(job_row())
            session.flush()
            postgres.stop()

    with pytest.raises(CatalogueUnavailable, match="does not answer"):
        stop_in_the_middle()
    for _ in range(2):
        with pytest.raises(CatalogueUnavailable, match="does not answer"), catalogue.read() as session:
            session.get(Job, "demo")

    postgres.start()
    with catalogue.read() as session:
        assert session.get(Job, "demo") is None
    catalogue.close()


@pytest.mark.parametrize(
    "url", ["", "nonsense", "sqlite://", "sqlite:///:memory:", "mysql://host/name", "postgresql+asyncpg://host/name"]
)
def test_a_url_that_cannot_work_is_named(url: str) -> None:
    with pytest.raises(UsageError, match="SUREFOOT_DATABASE_URL"):
        Database(url)


def test_passwords_are_not_shown() -> None:
    catalogue = Database("postgresql://me:secret@127.0.0.1:1/name")
    with pytest.raises(CatalogueUnavailable) as caught:
        catalogue.check_schema()
    assert "secret" not in str(caught.value)
    catalogue.close()
