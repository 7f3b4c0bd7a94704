"""A read sees one state of the database, whatever is committed while it goes on: on both kinds."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection, func, select, text

from trainmaster.store import jobs, tables
from trainmaster.store.database import Database

from .rows import AT, JOB, a_job_with_everything

pytestmark = pytest.mark.both_databases


def count(conn: Connection) -> int:
    return int(conn.execute(select(func.count()).select_from(tables.transitions)).scalar_one())


def test_a_read_does_not_see_what_is_committed_after_its_first_query(db: Database) -> None:
    a_job_with_everything(db)
    with db.read() as conn:
        before = count(conn)
        with db.write() as other:
            other.execute(text("DELETE FROM transitions"))
        assert count(conn) == before > 0
    with db.read() as conn:
        assert count(conn) == 0


def test_a_write_after_a_read_on_the_same_connection_sees_the_newest(db: Database) -> None:
    """The pool is shared: a connection that was read with must not keep that manner when it is written with."""
    a_job_with_everything(db)
    for round_ in range(3):
        with db.read() as conn:
            count(conn)
        with db.write() as conn:
            seen = count(conn)
            with db.read() as other:
                assert count(other) == seen
            jobs.set_message(conn, JOB, f"{round_}")
        if db.engine.dialect.name == "postgresql":
            with db.write() as conn:
                assert conn.exec_driver_sql("SHOW transaction_isolation").scalar_one() == "read committed"


def test_what_a_read_writes_is_rolled_back(db: Database) -> None:
    a_job_with_everything(db)
    with db.read() as conn:
        conn.execute(text("UPDATE jobs SET name = 'other'"))
    job = jobs.find_job(db, JOB)
    assert job is not None and job.name == "trial" and job.created_at == AT
