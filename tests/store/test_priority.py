"""The priority of a job that waits changes in its stored spec, and nothing of a job that waits no longer."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from sqlalchemy import select

from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Stage, Status
from trainmaster.store import jobs
from trainmaster.store import tables as t
from trainmaster.store.capacity.queue import set_priority
from trainmaster.store.database import Database

from .rows import AT, JOB

pytestmark = pytest.mark.both_databases

SPEC = {"name": "trial", "command": ["x"], "env": {"A": "1"}, "queue": {"preemptible": True, "max_wait_s": 60}}


@pytest.fixture
def queued(db: Database) -> Database:
    with db.write() as conn:
        jobs.insert_job(conn, JOB, parse_spec(SPEC), at=AT)
    return db


def change(db: Database, word: str, job: str = JOB) -> str | None:
    with db.write() as conn:
        return set_priority(conn, job, word)


def stored(db: Database) -> dict[str, object]:
    with db.read() as conn:
        return dict(conn.execute(select(t.jobs).where(t.jobs.c.id == JOB)).mappings().one())


def test_the_rest_of_the_row_stays_with_the_time_since_which_it_waits(queued: Database) -> None:
    before = stored(queued)
    assert change(queued, "high") == "normal" and change(queued, "urgent") == "high"
    after = stored(queued)
    assert after.pop("spec") == {**before["spec"], "queue": {**before["spec"]["queue"], "priority": "urgent"}}  # type: ignore[index, dict-item]
    assert after == {name: value for name, value in before.items() if name != "spec"}
    row = jobs.find_job(queued, JOB)
    assert row is not None and row.spec == parse_spec({**SPEC, "queue": {**SPEC["queue"], "priority": "urgent"}})  # type: ignore[dict-item]


def test_an_older_row_without_the_block_has_the_default(queued: Database) -> None:
    with queued.write() as conn:
        conn.execute(t.jobs.update().values(spec={"name": "trial", "command": ["x"]}))
    assert change(queued, "low") == "normal"
    assert stored(queued)["spec"] == {"name": "trial", "command": ["x"], "queue": {"priority": "low"}}


def test_a_job_that_waits_no_longer_is_left_alone(queued: Database) -> None:
    assert change(queued, "high", job="00000000-0000-4000-8000-000000000009") is None
    with queued.write() as conn:
        jobs.advance(conn, JOB, seen=Stage.QUEUED, to=Stage.PLACING, at=AT)
    before = stored(queued)
    assert change(queued, "high") is None and stored(queued) == before


def test_nor_one_that_is_cancelled_or_over(queued: Database) -> None:
    with queued.write() as conn:
        jobs.request_cancel(conn, JOB, at=AT)
    assert change(queued, "high") is None
    with queued.write() as conn:
        jobs.finish(conn, JOB, seen=Stage.QUEUED, status=Status.CANCELLED, at=AT + timedelta(seconds=1))
    before = stored(queued)
    assert change(queued, "high") is None and stored(queued) == before


@pytest.mark.parametrize("placed", [True, False])
def test_while_a_reconciler_places_it_the_change_waits_for_what_it_commits(queued: Database, placed: bool) -> None:
    said: list[str | None] = []
    asking = threading.Thread(target=lambda: said.append(change(queued, "high")))
    try:
        with queued.write() as conn:
            jobs.advance(conn, JOB, seen=Stage.QUEUED, to=Stage.PLACING, at=AT)
            asking.start()
            asking.join(timeout=0.3)
            assert asking.is_alive(), "it read the row before the other transaction was over"
            if not placed:
                raise _Killed
    except _Killed:
        pass
    asking.join(timeout=30)
    assert said == [None if placed else "normal"]
    row = jobs.find_job(queued, JOB)
    assert row is not None
    assert (row.stage, row.spec.queue.priority) == ((Stage.PLACING, "normal") if placed else (Stage.QUEUED, "high"))


class _Killed(Exception):
    pass
