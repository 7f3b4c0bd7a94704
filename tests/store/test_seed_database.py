"""Seed 004, phase 1.1: each of its checkboxes, on SQLite and on PostgreSQL."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import insert, select
from sqlalchemy.exc import IntegrityError

from trainmaster.core.events import split
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import Stage, Status
from trainmaster.store import attempts, events, jobs, tables
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database
from trainmaster.store.page_rows import iterations

pytestmark = pytest.mark.both_databases

AT = datetime(2025, 11, 4, 10, 0, 0, tzinfo=UTC)


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.spawns)])
def db(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """One database of each kind for all of them: every test has jobs of its own."""
    if request.param == "sqlite":
        where = str(tmp_path_factory.mktemp("seed") / "trainmaster.db")
    else:
        where = request.getfixturevalue("postgres").create()
    database = open_database(where)
    yield database
    database.close()


def new_job(db: Database, *, project: str = "default", at: datetime = AT, status: Status = Status.PENDING) -> str:
    job_id = str(uuid.uuid4())
    with db.write() as conn:
        jobs.insert_job(conn, job_id, JobSpec(name="a", project=project, command=("true",)), at=at)
        if status is Status.FAILED:
            assert jobs.finish(conn, job_id, seen=Stage.QUEUED, status=status, at=at)
    return job_id


def tell(db: Database, job_id: str, *lines: bytes) -> None:
    with db.write() as conn:
        attempt = attempts.insert_attempt(conn, job_id, 1, handle={}, at=AT)
        cut = split(b"\n".join(lines) + b"\n", offset=0, zone=UTC)
        assert events.append_events(conn, attempt, "events.jsonl", seen_offset=0, lines=cut)


ITERATION = b'{"phase":"ITERATION","event":"start","iteration":1}'
EPOCH = b'{"phase":"TRAINING","event":"epoch_complete","iteration":1,"epoch":1,"data":{"avg_loss":0.5}}'
EVAL = b'{"phase":"EVAL_MODEL","event":"metrics","iteration":1,"data":{"model_id":"m","metrics":{"f1":0.9}}}'


def test_database_connection_works(db: Database) -> None:
    with db.read() as conn:
        assert conn.execute(select(1)).scalar_one() == 1


def test_can_create_training_job_records(db: Database) -> None:
    job = jobs.find_job(db, new_job(db))
    assert job is not None and (job.name, job.status, job.created_at) == ("a", Status.PENDING, AT)


def test_can_create_training_iteration_records(db: Database) -> None:
    tell(db, job_id := new_job(db), ITERATION)
    assert [row.number for row in iterations.list_iterations(db, job_id)] == [1]
    assert iterations.find_iteration(db, job_id, 2) is None


def test_can_create_epoch_train_records(db: Database) -> None:
    tell(db, job_id := new_job(db), ITERATION, EPOCH)
    (iteration,) = iterations.list_iterations(db, job_id)
    assert [(row.number, row.avg_loss) for row in iterations.list_epochs(db, iteration.id)] == [(1, 0.5)]
    assert iterations.count_epochs(db, iteration.id) == 1


def test_can_create_eval_records(db: Database) -> None:
    tell(db, job_id := new_job(db), EVAL)
    assert [(row.model_id, row.metrics) for row in iterations.list_evals(db, job_id=job_id)] == [("m", {"f1": 0.9})]


def test_foreign_key_relationships_work_correctly(db: Database) -> None:
    tell(db, job_id := new_job(db), ITERATION, EPOCH, EVAL)
    (iteration,) = iterations.list_iterations(db, job_id)
    (epoch,), (judged,) = iterations.list_epochs(db, iteration.id), iterations.list_evals(db, job_id=job_id)
    assert (iteration.job_id, epoch.iteration_id, judged.iteration_id) == (job_id, iteration.id, iteration.id)
    for orphan in (
        insert(tables.iterations).values(job_id="nobody", number=1),
        insert(tables.epochs).values(iteration_id=10**9, number=1, attempt=f"{job_id}.1"),
        insert(tables.steps).values(iteration_id=10**9, kind="training"),
    ):
        with pytest.raises(IntegrityError), db.write() as conn:
            conn.execute(orphan)


def test_query_filtering_works(db: Database) -> None:
    """By status and by project."""
    one, two = new_job(db, project="filter"), new_job(db, project="filter", status=Status.FAILED)
    new_job(db, project="other", status=Status.FAILED)
    assert {job.id for job in jobs.list_jobs(db, project="filter")} == {one, two}
    assert [job.id for job in jobs.list_jobs(db, project="filter", status=Status.FAILED)] == [two]
    assert jobs.count_jobs(db, project="filter", status=Status.RUNNING) == 0
    assert jobs.list_jobs(db, project="none") == []


def test_pagination_works(db: Database) -> None:
    """By limit and offset: every job on exactly one page."""
    made = {new_job(db, project="pages", at=AT + timedelta(seconds=n // 2)) for n in range(7)}
    pages = [jobs.list_jobs(db, project="pages", limit=3, offset=start) for start in (0, 3, 6, 9)]
    assert [len(page) for page in pages] == [3, 3, 1, 0]
    assert {job.id for page in pages for job in page} == made
    assert jobs.count_jobs(db, project="pages") == 7


def test_ordering_works(db: Database) -> None:
    """By created_at, newest first."""
    made = [new_job(db, project="order", at=AT + timedelta(microseconds=n)) for n in (2, 0, 1)]
    assert [job.id for job in jobs.list_jobs(db, project="order")] == [made[0], made[2], made[1]]
