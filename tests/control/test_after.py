"""`after:` holds a job back until others are over: order, failure, deletion, cancel, names, other projects."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete

from trainmaster.control import submit as submitting
from trainmaster.control.queueing import sets
from trainmaster.core.config.sweep import parse_sweep
from trainmaster.core.errors import SpecError
from trainmaster.core.spec import JobSpec, parse_spec
from trainmaster.core.states import Reason, Stage, Status, TargetState
from trainmaster.pages import queue as queue_page
from trainmaster.queueing.state import Device
from trainmaster.store import jobs, leases, tables
from trainmaster.store.capacity import after, devices, queue
from trainmaster.store.capacity import sets as store
from trainmaster.store.database import Database
from trainmaster.store.rows import JobRow
from trainmaster.targets import find_place

from .scripted import GOOD, RUNNING, Scripted, ended
from .test_reconcile import find, reconcile_until, settle

pytestmark = pytest.mark.both_databases


def spec(name: str, *before: str, on: str = "success", **more: Any) -> JobSpec:
    waits = {"after": {"jobs": list(before), "on": on}} if before else {}
    return parse_spec({"name": name, "target": "scripted", "command": ["true"], **waits, **more})


def finish(db: Database, job: JobRow, status: Status, message: str = "") -> None:
    with db.write() as conn:
        jobs.finish(conn, job.id, seen=Stage.QUEUED, status=status, message=message, at=datetime.now(UTC))


def test_it_starts_when_all_are_over_and_says_for_whom_it_waits(db: Database, tmp_path: Path) -> None:
    target = Scripted(RUNNING)
    first, second = (submitting.submit(db, spec(name), load=target.load) for name in ("prepare", "tokens"))
    third = submitting.submit(db, spec("train", "prepare", second.id), load=target.load)
    assert third.message == "waits for prepare, tokens to end"
    reconcile_until(db, tmp_path, target, lambda: find(db, second).stage is Stage.RUNNING)
    (line,) = queue_page.read(db).jobs
    assert (line.name, line.position, line.reason) == ("train", None, "waits for prepare, tokens to end")
    target.polls = [GOOD]
    (last,) = settle(db, tmp_path, target, third)
    assert last.status is Status.COMPLETED and target.started[-1].startswith(third.id)
    ends = [row.ended_at for row in (find(db, first), find(db, second))]
    assert last.started_at is not None and all(end is not None and end <= last.started_at for end in ends)
    assert after.list_before(db, third.id) == []


@pytest.mark.proof
@pytest.mark.parametrize("on", ["success", "always"])
def test_one_that_fails_ends_it_with_the_reason_or_not(db: Database, tmp_path: Path, on: str) -> None:
    target = Scripted(ended(TargetState.FAILED, Reason.SCRIPT_FAILED))
    first = submitting.submit(db, spec("prepare"), load=target.load)
    second = submitting.submit(db, spec("train", "prepare", on=on), load=target.load)
    third = submitting.submit(db, spec("report", "train"), load=target.load)
    settle(db, tmp_path, target, first, second, third)
    row = find(db, second)
    if on == "always":
        assert row.reason is Reason.SCRIPT_FAILED and row.attempts == 1
    else:
        assert (row.status, row.reason, row.attempts) == (Status.FAILED, Reason.DEPENDENCY_FAILED, 0)
        assert f"prepare ({first.id}), which it waited for, is failed: " in row.message
    assert find(db, third).reason is Reason.DEPENDENCY_FAILED, "those behind it end too"
    assert target.made("submit") == (2 if on == "always" else 1)


@pytest.mark.proof
@pytest.mark.parametrize("on", ["success", "always"])
def test_one_that_was_deleted_is_not_taken_for_a_success(db: Database, tmp_path: Path, on: str) -> None:
    target = Scripted(GOOD)
    first = submitting.submit(db, spec("prepare"), load=target.load)
    second = submitting.submit(db, spec("train", first.id[:13], on=on), load=target.load)
    finish(db, first, Status.COMPLETED)
    with db.write() as conn:
        jobs.delete_job(conn, first.id)
    (row,) = settle(db, tmp_path, target, second)
    if on == "always":
        assert row.status is Status.COMPLETED
    else:
        assert row.reason is Reason.DEPENDENCY_FAILED and "was deleted, so how it ended is not known" in row.message


def test_cancelled_while_it_waits_it_ends_at_once(db: Database, tmp_path: Path) -> None:
    target = Scripted(RUNNING)
    first = submitting.submit(db, spec("prepare"), load=target.load)
    second = submitting.submit(db, spec("train", "prepare"), load=target.load)
    submitting.cancel(db, second.id)
    (row,) = settle(db, tmp_path, target, second)
    assert row.status is Status.CANCELLED and not find(db, first).status.final
    with db.write() as conn:
        jobs.delete_job(conn, second.id)
    assert jobs.find_job(db, second.id) is None


def test_unknown_names_are_refused_and_a_job_of_another_project_is_unknown(db: Database) -> None:
    target = Scripted(RUNNING)
    theirs = submitting.submit(db, spec("prepare", project="other"), load=target.load)
    for word in ("prepare", theirs.id, "train"):  # `train` is the job's own name: it cannot wait for itself
        with pytest.raises(SpecError) as refused:
            submitting.submit(db, spec("train", word), load=target.load)
        assert f"after.jobs[0]: the project default has no job {word!r}" in str(refused.value)
    assert jobs.count_jobs(db) == 1


def test_a_set_is_not_called_unknown(db: Database) -> None:
    row = sets.submit_set(db, parse_sweep({"name": "lr", "command": ["x"], "matrix": {"env.A": ["1", "2"]}}))
    target = Scripted(RUNNING)
    for word in ("lr", row.id):
        with pytest.raises(SpecError) as refused:
            submitting.submit(db, spec("train", word), load=target.load)
        text = f"after.jobs[0]: {word!r} is a set of runs, and a job waits for jobs: name those of its runs"
        assert text in str(refused.value) and "as lr-1; `trainmaster show lr`" in str(refused.value)
    with pytest.raises(SpecError, match="the project other has no job 'lr'"):
        submitting.submit(db, spec("train", "lr", project="other"), load=target.load)


def test_a_name_is_the_newest_job_of_it_and_a_repeated_submission_the_same_job(db: Database) -> None:
    target = Scripted(RUNNING)
    old, new = (submitting.submit(db, spec("prepare"), load=target.load) for _ in range(2))
    later = old if (old.created_at, old.id) > (new.created_at, new.id) else new
    job, made = submitting.submit_once(db, spec("train", "prepare"), key="k", load=target.load)
    assert made and [other.id for other in after.list_before(db, job.id)] == [later.id]
    submitting.submit(db, spec("prepare"), load=target.load)
    assert submitting.submit_once(db, spec("train", "prepare"), key="k", load=target.load) == (job, False)
    assert [other.id for other in after.list_before(db, job.id)] == [later.id]


@pytest.mark.proof
def test_one_that_is_run_again_waits_for_nobody(db: Database, tmp_path: Path) -> None:
    target = Scripted(ended(TargetState.FAILED, Reason.SCRIPT_FAILED), GOOD)
    submitting.submit(db, spec("prepare"), load=target.load)
    second = submitting.submit(db, spec("train", "prepare"), load=target.load)
    settle(db, tmp_path, target, second)
    target.polls = [GOOD]
    again, _ = submitting.run_again(db, second.id, load=target.load)
    assert settle(db, tmp_path, target, again)[0].status is Status.COMPLETED


def test_held_back_it_takes_no_place_in_our_queue_and_its_wait_begins_afterwards(db: Database) -> None:
    """Else a job that may not start would have GPUs reserved, and would be the oldest when its turn comes."""
    start, ids = datetime.now(UTC) - timedelta(hours=30), [f"{0:08}-0000-4000-8000-{n:012}" for n in range(2)]
    with db.write() as conn:
        devices.record(conn, find_place("local"), "gpu", [Device(id="GPU-0", machine="m0")], at=start)
        for job_id, name in zip(ids, ("prepare", "train"), strict=True):
            jobs.insert_job(conn, job_id, parse_spec({"name": name, "command": ["x"]}), at=start)
    first, second = jobs.find_job(db, ids[0]), ids[1]
    assert first is not None
    with db.write() as conn:
        after.insert_after(conn, second, [first.id])
        leases.take(conn, "t", owner="a test")
    assert [row.id for row in queue.list_waiting(db, words=["local"])] == [first.id]
    assert leases.list_due(db, "t") == [first.id]
    before = queue.read_stamp(db, ["local"])
    finish(db, first, Status.COMPLETED)
    assert leases.list_due(db, "t") == [second] and queue.read_stamp(db, ["local"]) != before
    assert queue.list_waiting(db, words=["local"]) == [], "it may have to fail: nobody is stopped for it"
    now = datetime.now(UTC)
    with db.write() as conn:
        after.release(conn, second, at=now)
    (row,) = queue.list_waiting(db, words=["local"])
    assert row.since == now and row.message == ""


def test_the_trials_of_a_set_wait_for_the_job_that_had_the_name_then(db: Database) -> None:
    first = submitting.submit(db, parse_spec({"name": "prepare", "command": ["x"]}))
    document = {"name": "lr", "command": ["x", "{n}"], "matrix": {"n": [1, 2]}, "after": {"jobs": ["prepare"]}}
    row = sets.submit_set(db, parse_sweep(document))
    submitting.submit(db, parse_spec({"name": "prepare", "command": ["x"]}))
    sets.advance(db)
    begun = [trial.job_id for trial in store.list_trials(db, row.id) if trial.job_id is not None]
    assert len(begun) == 2
    assert [[other.id for other in after.list_before(db, job)] for job in begun] == [[first.id]] * 2


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["matrix", "search"])
def test_trials_whose_predecessor_was_deleted_fail_for_it_and_the_set_ends(
    db: Database, tmp_path: Path, kind: str
) -> None:
    first = submitting.submit(db, parse_spec({"name": "prepare", "command": ["x"]}))
    varied: dict[str, object] = {"matrix": {"n": [1, 2]}}
    if kind == "search":
        varied = {"search": {"parameters": {"n": [1, 2]}, "sampler": "grid"}}
    document = {"name": "lr", "command": ["x", "{n}"], "parallel": 1, "after": {"jobs": ["prepare"]}, **varied}
    row = sets.submit_set(db, parse_sweep(document))
    later = submitting.submit(db, parse_spec({"name": "prepare", "command": ["x"]}))
    sets.advance(db)
    (job,) = [trial.job_id for trial in store.list_trials(db, row.id) if trial.job_id is not None]
    assert [other.id for other in after.list_before(db, job)] == [first.id], f"not {later.id}"
    with db.write() as conn:
        jobs.finish(conn, first.id, seen=Stage.QUEUED, status=Status.COMPLETED, at=datetime.now(UTC))
        jobs.finish(conn, job, seen=Stage.QUEUED, status=Status.COMPLETED, at=datetime.now(UTC))
        conn.execute(delete(tables.transitions).where(tables.transitions.c.job_id == first.id))
        conn.execute(delete(tables.jobs).where(tables.jobs.c.id == first.id))
    sets.advance(db)
    begun = [trial.job_id for trial in store.list_trials(db, row.id) if trial.job_id is not None]
    assert len(begun) == 2, [each.message for each in store.list_unfinished(db)]
    assert [(other.id, other.status) for other in after.list_before(db, begun[1])] == [(first.id, None)]
