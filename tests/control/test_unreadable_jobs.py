"""A job whose stored spec cannot be read keeps no other job waiting."""

from __future__ import annotations

import json
import logging
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.exc import DataError

from control.driving import driven, wait
from control.scripted import at_once
from control.test_dispatch import Shared
from store.rows import list_open
from trainmaster.control import submit as submitting
from trainmaster.control.notify import unreadable
from trainmaster.control.queueing import dispatch
from trainmaster.core import schema
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Stage, Status
from trainmaster.queueing.state import Device, Rules
from trainmaster.storage import open_store
from trainmaster.store import attempts, jobs
from trainmaster.store import tables as t
from trainmaster.store.capacity import devices, order
from trainmaster.store.database import Database
from trainmaster.store.heads import JobHead, find_head
from trainmaster.store.rows import JobRow

NOW = datetime(2026, 11, 18, tzinfo=UTC)
SECRET = "words-of-another-project"
KINDS = {
    "no JSON": f'{{"name": "{SECRET}',
    "no mapping": f'["{SECRET}"]',
    "a part is no mapping": json.dumps({"name": SECRET, "command": ["x"], "resources": SECRET}),
    "no number": json.dumps({"name": SECRET, "command": ["x"], "limits": {"timeout_s": SECRET}}),
    "newer field": None,
}


def spoil(db: Database, job_id: str, kind: str) -> None:
    """Store a spec of this kind for the job."""
    job = jobs.find_job(db, job_id)
    assert job is not None
    written = KINDS[kind] or json.dumps({**schema.to_plain(job.spec), "field_of_tomorrow": SECRET})
    stored = "CAST(:spec AS jsonb)" if db.engine.dialect.name == "postgresql" else ":spec"
    with db.write() as conn:
        conn.execute(text(f"UPDATE jobs SET spec = {stored} WHERE id = :id"), {"spec": written, "id": job_id})


def is_stored(db: Database, job_id: str, kind: str) -> bool:
    """Store it, where the database takes it: PostgreSQL refuses what is no JSON."""
    if (db.engine.dialect.name, kind) == ("postgresql", "no JSON"):
        with pytest.raises(DataError, match="invalid input syntax for type json"):
            spoil(db, job_id, kind)
        return False
    spoil(db, job_id, kind)
    return True


def _submit(db: Database, target: Shared, project: str) -> JobRow:
    mapping = {"name": "a", "project": project, "command": ["x"], "preflight": {"level": 0}}
    return submitting.submit(db, parse_spec(mapping), load=target.load)


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("kind", KINDS)
def test_the_queue_leaves_it_out(kind: str, db: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is the oldest and would have the only GPU; the others start one after the other, and the log has it once."""
    target = Shared(1)
    bad = _submit(db, target, "lab")
    spoil(db, bad.id, kind)
    good = [_submit(db, target, project) for project in ("lab", "other", "other")]
    target.ends.update(job.id for job in good)

    def done() -> bool:
        rows = [jobs.find_job(db, job.id) for job in good]
        return all(row is not None and row.status is Status.COMPLETED for row in rows)

    caplog.set_level(logging.WARNING)
    with driven(db, tmp_path, open_store(tmp_path / "s"), load=target.load, rest_s=at_once):
        wait(done)
    named = [record.getMessage() for record in caplog.records if bad.id in record.getMessage()]
    assert len(named) == 1 and "cannot be read" in named[0]
    assert "could not be decided" not in caplog.text and SECRET not in caplog.text
    assert not target.faults and bad.id in list_open(db)


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("kind", KINDS)
def test_its_people_are_told_once_and_a_queued_one_is_cancelled(kind: str, db: Database, tmp_path: Path) -> None:
    target = Shared(1)
    runs, waits = (_submit(db, target, "lab") for _ in range(2))

    def head(job: JobRow) -> JobHead:
        found = find_head(db, job.id)
        assert found is not None
        return found

    with driven(db, tmp_path, open_store(tmp_path / "s"), load=target.load, rest_s=at_once):
        wait(lambda: head(runs).stage == Stage.RUNNING)
        for job in (runs, waits):
            spoil(db, job.id, kind)
        wait(lambda: head(waits).message == unreadable.QUEUED)
        for job in (runs, waits):
            assert submitting.request_cancel(db, job.id)
        wait(lambda: all(head(job).status == Status.CANCELLED for job in (waits, runs)))
    assert "cannot be read" in head(waits).message and not target.holds, "what ran is stopped and given back"
    with db.read() as conn:
        news = conn.execute(select(t.outbox.c.job_id, t.outbox.c.topic).order_by(t.outbox.c.id)).all()
        moves = conn.execute(select(t.transitions.c.job_id).where(t.transitions.c.status == "cancelled")).all()
    told = [(each.job_id, each.topic) for each in news if each.topic in ("job.stalled", "job.cancelled")]
    # Of the one that runs not at all where its cancel came before a step.
    assert told.count((runs.id, "job.stalled")) in (0, 1) and told.count((runs.id, "job.cancelled")) == 1
    assert sorted(each for each in told if each[0] == waits.id) == [
        (waits.id, "job.cancelled"), (waits.id, "job.stalled"),
    ]  # fmt: skip
    assert sorted(moves) == sorted([(waits.id,), (runs.id,)])


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("kind", KINDS)
def test_one_that_runs_keeps_its_devices_and_no_others(kind: str, db: Database, tmp_path: Path) -> None:
    target = Shared(2)
    bad = _submit(db, target, "lab")

    def stage(job: JobRow) -> str | None:
        with db.read() as conn:
            found: str | None = conn.execute(select(t.jobs.c.stage).where(t.jobs.c.id == job.id)).scalar_one()
        return found

    with driven(db, tmp_path, open_store(tmp_path / "s"), load=target.load, rest_s=at_once):
        wait(lambda: stage(bad) == Stage.RUNNING)
        spoil(db, bad.id, kind)
        good = _submit(db, target, "other")
        wait(lambda: stage(good) == Stage.RUNNING)
    held = {attempt.partition(".")[0] for attempt in target.holds}
    assert held == {bad.id, good.id} and not target.faults


def _decide(db: Database, place: str) -> tuple[set[str], int]:
    """One pass of the queue: who starts, and how often it was decided."""
    context: Any = SimpleNamespace(
        db=db, now=lambda: NOW, rules=Rules(), token="tok", bookings={}, kinds={}, drained=set(), checks=dict
    )
    counted: list[int] = []
    real = order.decide

    def decide(*parts: Any, **more: Any) -> order.Decided:
        counted.append(len(parts[2]))
        return real(*parts, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "decide", decide)
        dispatch.Dispatcher(context)._pass(place, ["ssh:x"], late=False)
    return {*context.bookings}, len(counted)


def _queue(db: Database, project: str, *, later_s: float = 0, **more: Any) -> str:
    """A queued job that this process drives."""
    job_id = str(uuid.uuid4())
    mapping = {"name": "a", "project": project, "command": ["x"], "preflight": {"level": 0}, **more}
    lease = {"lease_token": "tok", "lease_owner": "h", "lease_until": datetime.now(UTC) + timedelta(hours=1)}
    with db.write() as conn:
        jobs.insert_job(conn, job_id, parse_spec(mapping), at=NOW + timedelta(seconds=later_s), word="ssh:x")
        conn.execute(update(t.jobs).where(t.jobs.c.id == job_id).values(lease))
    return job_id


def _start_behind_it(db: Database, ahead: int, *, holder: str, quotas: dict[str, int], gpus: int, good: str) -> bool:
    """Whether the last job of the queue starts: a project holds one GPU, and one that cannot be read waits for two."""
    held = _queue(db, holder)
    with db.write() as conn:
        devices.record(conn, "p", "gpu", [Device(id=f"g{n}", machine="m") for n in range(gpus)], at=NOW)
        for project, quota in quotas.items():
            devices.set_share(conn, project, quota=quota)
        attempt = attempts.insert_attempt(conn, held, 1, handle={}, at=NOW)
        jobs.advance(conn, held, seen=Stage.QUEUED, to=Stage.PLACING, at=NOW)
        devices.book(conn, "p", attempt, {"m": ("g0",)}, at=NOW)
    for _ in range(ahead):
        _queue(db, "full", queue={"priority": "high"})
    spoil(db, _queue(db, "lab", resources={"processes_per_node": 2}), "newer field")
    last = _queue(db, good, later_s=1)
    return _decide(db, "p")[0] == {last}


@pytest.mark.parametrize("ahead", [5, 12])
def test_nothing_is_kept_free_for_it_however_far_behind_it_waits(ahead: int, db: Database) -> None:
    """Jobs over their quota come first; then it, which needs both GPUs; then one that needs the GPU that is free."""
    assert _start_behind_it(db, ahead, holder="full", quotas={"full": 1}, gpus=2, good="other")


@pytest.mark.parametrize("ahead", [0, 12])
def test_none_of_its_project_waits_for_its_quota_behind_it(ahead: int, db: Database) -> None:
    """It needs two devices and its project may have one more; the next job needs one. Others are before both."""
    assert _start_behind_it(db, ahead, holder="lab", quotas={"lab": 2, "full": 0}, gpus=3, good="lab")


def test_many_of_them_cost_few_decisions(db: Database) -> None:
    with db.write() as conn:
        devices.record(conn, "p", "gpu", [Device(id="g0", machine="m", used="someone")], at=NOW)
    first = _queue(db, "lab")
    spoil(db, first, "newer field")
    with db.write() as conn:
        row = dict(conn.execute(select(t.jobs).where(t.jobs.c.id == first)).mappings().one())
        conn.execute(t.jobs.insert(), [{**row, "id": str(uuid.uuid4())} for _ in range(599)])
    assert _decide(db, "p") == (set(), 3)
