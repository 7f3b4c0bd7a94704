"""Queries give what was written, in order, a page at a time, and each walks an index."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, event, insert

from trainmaster.core.schema import to_plain
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import Reason, Stage, Status, TargetState
from trainmaster.store import attempts, events, jobs, nodes, tables
from trainmaster.store.database import Database
from trainmaster.store.page_rows import search

from .rows import AT, JOB, LINES, a_job_with_everything, count_faults, list_open

pytestmark = pytest.mark.both_databases

SPEC = JobSpec(name="trial", command=("true",))


def test_a_job_and_its_attempt_come_back_as_they_were(db: Database) -> None:
    attempt = a_job_with_everything(db)
    job = jobs.find_job(db, JOB)
    assert job is not None
    assert (job.status, job.stage, job.reason, job.message) == (Status.FAILED, None, Reason.SCRIPT_FAILED, "no")
    assert (job.spec, job.attempts, job.created_at, job.ended_at) == (
        JobSpec(name="trial", command=("false",)),
        1,
        AT,
        AT,
    )
    (row,) = attempts.list_attempts(db, JOB)
    assert (row.id, row.number, row.handle, row.report) == (attempt, 1, {"folder": "/x"}, TargetState.FAILED)
    assert row.exit is not None
    assert (row.exit.exit_codes, row.exit.reason) == ({"0": 1}, Reason.SCRIPT_FAILED)
    assert jobs.find_job(db, "nobody") is None
    assert list_open(db) == []


def test_events_come_back_with_every_field_and_garbage_is_kept(db: Database) -> None:
    attempt = a_job_with_everything(db)
    first, garbage, last = events.list_events(db, JOB)
    assert (first.phase, first.event, first.seq, first.data) == ("TRAINING", "start", 1, {"steps": 4})
    assert first.ts is not None and first.ts.isoformat() == "2025-03-01T12:00:00+00:00"
    assert (garbage.phase, garbage.text, garbage.data) == (None, "not json", {})
    assert (last.epoch, last.ts, last.extra, last.fault) == (1, None, {"who": "me"}, None)
    assert last.offset + last.length == len(LINES)
    assert count_faults(db, JOB) == 1
    assert events.list_events(db, JOB, phase="STEP") == [last]
    assert events.find_event(db, attempt, phase="STEP", event="metrics") == last
    assert events.find_event(db, attempt, phase="STEP", event="start") is None


@pytest.fixture
def three_attempts(db: Database) -> Database:
    """20 lines in each of three attempts; the second attempt wrote nothing."""
    with db.write() as conn:
        jobs.insert_job(conn, JOB, SPEC, at=AT)
        for number in (1, 2, 3):
            attempt = attempts.insert_attempt(conn, JOB, number, handle=None, at=AT)
            rows = [
                {"attempt": attempt, "stream": "events.jsonl", "offset": n * 10, "length": 10}
                | {"phase": "STEP" if n % 2 else "EVAL_MODEL", "event": "metrics"}
                for n in range(20 if number != 2 else 0)
            ]
            if rows:
                conn.execute(insert(tables.events), rows)
    return db


@pytest.mark.parametrize("phase", [None, "STEP"])
@pytest.mark.parametrize("page", [1, 7, 20, 1000])
def test_pages_of_events_join_to_the_whole_across_attempts(
    three_attempts: Database, phase: str | None, page: int
) -> None:
    whole = [(n, o * 10) for n in (1, 3) for o in range(20) if phase is None or o % 2]
    cursors: list[tuple[int, int]] = []
    while rows := events.list_events(
        three_attempts, JOB, phase=phase, limit=page, after=cursors[-1] if cursors else None
    ):
        assert len(rows) <= page
        cursors += [row.cursor for row in rows]
    assert cursors == whole


def test_jobs_are_listed_newest_first_filtered_and_counted(db: Database) -> None:
    _many_jobs(db, 30)
    pages = [jobs.list_jobs(db, limit=7, offset=start) for start in range(0, 35, 7)]
    assert [job.id for page in pages for job in page] == [f"job-{n:05}" for n in reversed(range(30))]
    failed = jobs.list_jobs(db, status=Status.FAILED, project="p1")
    assert {(job.status, job.project) for job in failed} == {(Status.FAILED, "p1")}
    assert len(failed) == jobs.count_jobs(db, status=Status.FAILED, project="p1") == 5
    assert jobs.count_jobs(db) == 30
    assert list_open(db) == [f"job-{n:05}" for n in range(0, 30, 3)]


def test_no_query_of_a_page_scans_or_sorts_a_table(sqlite_db: Database) -> None:
    """The plan, not the clock, is what holds at any size."""
    _many_jobs(sqlite_db, 300)
    a_job_with_everything(sqlite_db)
    plans: list[str] = []

    def explain(conn: Connection, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool) -> None:
        if statement.lstrip().startswith("SELECT"):
            cursor = conn.connection.cursor()
            cursor.execute("EXPLAIN QUERY PLAN " + statement, parameters)
            plans.extend(row[3] for row in cursor.fetchall())

    event.listen(sqlite_db.engine, "before_cursor_execute", explain)
    jobs.list_jobs(sqlite_db)
    jobs.list_jobs(sqlite_db, status=Status.FAILED)
    jobs.list_jobs(sqlite_db, project="p1")
    jobs.count_jobs(sqlite_db, status=Status.RUNNING)
    list_open(sqlite_db)
    events.list_events(sqlite_db, JOB, after=(1, 0))
    events.list_events(sqlite_db, JOB, phase="STEP", after=(1, 0))
    events.find_event(sqlite_db, f"{JOB}.1", phase="STEP", event="metrics")
    count_faults(sqlite_db, JOB)
    jobs.list_transitions(sqlite_db, JOB)
    event.remove(sqlite_db.engine, "before_cursor_execute", explain)
    # The two that must not walk all events of an attempt to find a few of them.
    assert sum("ix_events_attempt_stream_phase_offset" in plan for plan in plans) == 2
    assert sum("ix_events_faults" in plan for plan in plans) == 1
    assert len(plans) >= 10
    assert [plan for plan in plans if "B-TREE" in plan or ("SCAN" in plan and "INDEX" not in plan)] == []


def test_nodes_and_gpus_are_found_without_reading_every_check(sqlite_db: Database) -> None:
    a_job_with_everything(sqlite_db)
    plans: list[str] = []

    def explain(conn: Connection, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool) -> None:
        if statement.lstrip().startswith(("SELECT", "WITH")):
            cursor = conn.connection.cursor()
            cursor.execute("EXPLAIN QUERY PLAN " + statement, parameters)
            plans.extend(row[3] for row in cursor.fetchall() if "check_results" in row[3])

    event.listen(sqlite_db.engine, "before_cursor_execute", explain)
    with sqlite_db.read() as conn:
        nodes.list_newest_checks(conn)
        nodes.list_node_checks(conn, "node-17")
        nodes.list_gpu_checks(conn, "1652000000001")
        nodes.list_measured(conn)
    search.find_nodes(sqlite_db, "node", project=None, limit=20)
    search.find_devices(sqlite_db, "1652000000001", project=None, limit=20)
    nodes.list_nodes(sqlite_db)
    event.remove(sqlite_db.engine, "before_cursor_execute", explain)
    # Of a search by name two: the first name, and the next one behind each.
    assert sum("COVERING INDEX ix_check_results_node_attempt_id" in plan for plan in plans) == 5
    assert sum("ix_check_results_telling" in plan for plan in plans) == 2
    assert sum("USING INDEX ix_check_results_bad" in plan for plan in plans) == 1
    assert [plan for plan in plans if "SCAN" in plan and "INDEX" not in plan] == []


def _many_jobs(db: Database, count: int) -> None:
    """Every third job is open; of the rest half failed, half completed."""
    states = [(Status.RUNNING, Stage.RUNNING), (Status.FAILED, None), (Status.COMPLETED, None)]
    rows = [
        {"id": f"job-{n:05}", "name": "trial", "project": f"p{n // 3 % 2}", "target": "local", "message": ""}
        | {"status": states[n % 3][0].value, "stage": states[n % 3][1], "spec": to_plain(SPEC)}
        | {"attempts": 1, "cancel_requested": False, "created_at": AT + timedelta(seconds=n)}
        for n in range(count)
    ]
    with db.write() as conn:
        conn.execute(insert(tables.jobs), rows)
