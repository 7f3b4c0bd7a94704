"""A database is opened with the promises the rest relies on, or refused in words a person can act on."""

from __future__ import annotations

import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, inspect, select, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateTable

from postgres import Postgres
from trainmaster.core.errors import StoreError
from trainmaster.core.spec import JobSpec
from trainmaster.store import database, events, jobs, migrate, tables
from trainmaster.store.database import Database, is_unavailable
from trainmaster.store.migrate import downgrade, open_database, upgrade

from .rows import AT, JOB, a_job_with_everything

pytestmark = pytest.mark.both_databases


def test_the_pragmas_hold_on_every_connection(sqlite_db: Database) -> None:
    wanted = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 15_000}
    with sqlite_db.read() as one, sqlite_db.read() as two:
        for conn in (one, two):
            assert {name: conn.exec_driver_sql(f"PRAGMA {name}").scalar() for name in wanted} == wanted


def test_migrations_give_exactly_the_tables_of_a_new_file(sqlite_db: Database) -> None:
    with sqlite_db.read() as conn:
        created = _schema(conn)
        assert conn.execute(text("SELECT version_num FROM alembic_version")).scalars().all() == migrate.revisions()[-1:]
    downgrade(sqlite_db, "base")
    upgrade(sqlite_db)
    with sqlite_db.read() as conn:
        context = MigrationContext.configure(conn, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, tables.metadata) == []
        # compare_metadata does not look at partial indexes and primary keys; SQLite's own words do.
        assert _schema(conn) == created
        assert "alembic_version" in created


def _schema(conn: Connection) -> dict[str, list[str]]:
    rows = conn.execute(text("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))
    return {name: sorted(_parts(sql)) for name, sql in rows}


def _parts(sql: str) -> list[str]:
    """Its columns and constraints. A column added later stands at the end of SQLite's text, whatever its place."""
    begin, _, rest = " ".join(sql.split()).partition("(")
    return [begin.strip(), *(part.strip() for part in re.split(r",(?![^(]*\))", rest.rpartition(")")[0]))]


def test_down_and_up_again_on_real_rows(sqlite_db: Database) -> None:
    a_job_with_everything(sqlite_db)
    downgrade(sqlite_db, "base")
    with sqlite_db.read() as conn:
        left = conn.execute(text("SELECT name FROM sqlite_master WHERE type = 'table'")).scalars().all()
    assert left == ["alembic_version"]
    upgrade(sqlite_db)
    a_job_with_everything(sqlite_db)
    assert jobs.find_job(sqlite_db, JOB) is not None


def test_gpus_of_the_jobs_that_are_there_are_counted_from_their_specs(any_db: Database) -> None:
    a_job_with_everything(any_db)
    specs: dict[str, Any] = {
        "many": {"resources": {"nodes": 2, "processes_per_node": 4}}, "odd": {"resources": {"nodes": "x"}}, "none": [],
    }  # fmt: skip
    with any_db.write() as conn:
        row = dict(conn.execute(tables.jobs.select()).mappings().one())
        for number, (name, spec) in enumerate(specs.items()):
            own = {"id": f"{number}", "name": name, "spec": spec, "gpus": None, "submit_key": None}
            conn.execute(tables.jobs.insert().values({**row, **own}))
    downgrade(any_db, "0022")
    upgrade(any_db)
    with any_db.read() as conn:
        counted = dict(conn.execute(select(tables.jobs.c.name, tables.jobs.c.gpus)).all())
    assert counted == {row["name"]: row["gpus"], "many": 8, "odd": 1, "none": 1}
    assert row["gpus"] is not None


def test_the_tables_can_be_made_on_postgresql() -> None:
    """What PostgreSQL would be told; it refuses NUL, wants zones, and can look into JSONB."""
    words = {
        table.name: str(CreateTable(table).compile(dialect=postgresql.dialect()))
        for table in tables.metadata.sorted_tables
    }
    assert "spec JSONB NOT NULL" in words["jobs"]
    assert "created_at TIMESTAMP WITH TIME ZONE NOT NULL" in words["jobs"]
    assert '"offset" BIGINT NOT NULL' in words["events"]
    assert "id BIGSERIAL NOT NULL" in words["transitions"]


def test_opening_again_keeps_what_was_written(sqlite_db: Database, tmp_path: Path) -> None:
    a_job_with_everything(sqlite_db)
    again = open_database(tmp_path / "trainmaster.db")
    assert events.list_events(again, JOB) == events.list_events(sqlite_db, JOB) != []
    again.close()


def test_a_newer_database_is_refused_with_what_to_do(sqlite_db: Database, tmp_path: Path) -> None:
    with sqlite_db.write() as conn:
        conn.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StoreError, match=r"'9999' is newer .*pip install -U trainmaster"):
        open_database(tmp_path / "trainmaster.db")


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_text("these are not the bytes you are looking for " * 100)
    with pytest.raises(StoreError, match="cannot be opened"):
        open_database(tmp_path / "x.db")


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_a_database_that_cannot_keep_every_character_is_refused(postgres: Postgres, encoding: str) -> None:
    url = postgres.create(encoding=encoding)
    with pytest.raises(StoreError, match=f"its encoding is {encoding}, and UTF8 is needed; create another"):
        open_database(url)


def test_the_encoding_of_the_client_does_not_matter(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    db = open_database(postgres.create())
    with db.read() as conn:
        assert conn.execute(text("SELECT CAST(:word AS VARCHAR)"), {"word": "漢字"}).scalar_one() == "漢字"
    db.close()


@pytest.mark.parametrize("stated", ["", "?connect_timeout=2"])
def test_a_server_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch, stated: str) -> None:
    monkeypatch.setattr(database, "_CONNECT_S", 60 if stated else 2)  # the URL goes first
    with socket.socket() as mute, ThreadPoolExecutor(1) as pool:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        url = f"postgresql+psycopg://postgres@127.0.0.1:{mute.getsockname()[1]}/t{stated}"
        opening = pool.submit(open_database, url)
        try:
            assert "timeout" in str(opening.exception(timeout=30))
        finally:
            mute.shutdown(socket.SHUT_RDWR)  # lets one that waits without end go


def test_a_standby_is_unavailable_and_its_values_are_not_blamed(postgres: Postgres) -> None:
    url = postgres.create()
    open_database(url).close()
    db = open_database(url + "?options=-cdefault_transaction_read_only%3Don")
    with pytest.raises(DBAPIError) as refused, db.write() as conn:
        conn.execute(text("DELETE FROM jobs"))
    assert is_unavailable(refused.value)
    db.close()


def test_a_table_that_somebody_holds_on_postgresql_is_not_waited_for_without_end(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_BUSY_MS", 200)
    db = open_database(postgres.create())
    with db.write() as holder, ThreadPoolExecutor(1) as other:
        holder.execute(text("LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE"))

        def write() -> None:
            with db.write() as conn:
                conn.execute(text("DELETE FROM jobs"))

        waiting = other.submit(write)
        try:
            with pytest.raises(DBAPIError, match="lock timeout") as refused:
                waiting.result(timeout=30)
        finally:
            holder.rollback()  # or a writer without a limit would be waited for here
    assert is_unavailable(refused.value)
    db.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_nothing_is_written_into_a_file_that_is_no_longer_there(sqlite_db: Database, replaced: bool) -> None:
    path = Path(sqlite_db.engine.url.database or "")
    path.rename(path.with_suffix(".old"))
    if replaced:
        open_database(path).close()
    for transaction in (sqlite_db.read, sqlite_db.write):
        with pytest.raises(StoreError, match="was replaced" if replaced else "was deleted"), transaction():
            pass
    assert path.exists() is replaced
    if not replaced:
        path.with_suffix(".old").rename(path)
        a_job_with_everything(sqlite_db)  # the same file again


def test_a_read_sees_one_moment(sqlite_db: Database) -> None:
    count = text("SELECT count(*) FROM jobs")
    with sqlite_db.read() as conn:
        assert conn.execute(count).scalar() == 0
        _insert_a_job(sqlite_db)
        assert conn.execute(count).scalar() == 0
    with sqlite_db.read() as conn:
        assert conn.execute(count).scalar() == 1


def test_a_read_inside_a_read_is_the_same_view(db: Database) -> None:
    with db.read() as conn:
        assert jobs.count_jobs(db) == 0
        with ThreadPoolExecutor() as others:
            others.submit(_insert_a_job, db).result()
            assert others.submit(jobs.count_jobs, db).result() == 1  # another thread has a view of its own
        assert jobs.count_jobs(db) == 0
        with db.read() as inner:
            assert inner is conn
    assert jobs.count_jobs(db) == 1


def _insert_a_job(db: Database) -> None:
    with db.write() as conn:
        jobs.insert_job(conn, JOB, JobSpec(name="a", command=("true",)), at=AT)


def test_an_error_takes_the_whole_transaction_back(sqlite_db: Database) -> None:
    with pytest.raises(RuntimeError), sqlite_db.write() as conn:
        jobs.insert_job(conn, JOB, JobSpec(name="a", command=("true",)), at=AT)
        raise RuntimeError
    assert jobs.count_jobs(sqlite_db) == 0


def test_writers_in_threads_wait_for_each_other(sqlite_db: Database) -> None:
    """Each reads, then writes what it read plus one: with a late lock some would be refused or lost."""
    with sqlite_db.write() as conn:
        conn.execute(text("CREATE TABLE counter (n INTEGER)"))
        conn.execute(text("INSERT INTO counter VALUES (0)"))

    def count_up() -> None:
        for _ in range(25):
            with sqlite_db.write() as conn:
                n = conn.execute(text("SELECT n FROM counter")).scalar_one()
                conn.execute(text("UPDATE counter SET n = :n"), {"n": n + 1})

    threads = [threading.Thread(target=count_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with sqlite_db.read() as conn:
        assert conn.execute(text("SELECT n FROM counter")).scalar() == 100


def test_a_migration_is_named_for_its_revision() -> None:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    from trainmaster.store import migrations

    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.set_main_option("path_separator", "os")
    in_order = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()][::-1]
    assert migrate.revisions() == in_order


@pytest.mark.slow
def test_databases_may_be_made_at_the_same_time(tmp_path: Path) -> None:
    """Each in a thread of its own; what makes and migrates them works on one thing at a time."""
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda number: open_database(tmp_path / f"{number}.db"), range(4)))
    for db in made:
        with db.read() as conn:
            assert inspect(conn).has_table("outbox")
        db.close()


def test_a_writer_that_gets_no_turn_says_so_after_one_wait_not_two(
    sqlite_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_BUSY_MS", 50)
    with sqlite_db.write(), ThreadPoolExecutor(1) as other:

        def write() -> None:
            with sqlite_db.write():
                pass

        with pytest.raises(StoreError, match="the database is locked"):
            other.submit(write).result(timeout=30)
