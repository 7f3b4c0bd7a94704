"""A job whose stored spec cannot be read is ended by its handle, and nothing of another job is touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sqlalchemy import update

from control.driving import driven, wait
from control.scripted import RUNNING, at_once
from control.test_dispatch import Shared
from control.test_local_jobs import SLEEP, processes_of
from control.test_local_jobs import submit as submit_here
from control.test_rented import Cloud, Target
from control.test_unreadable_jobs import KINDS, is_stored, spoil
from trainmaster.control import maintain
from trainmaster.control import submit as submitting
from trainmaster.control.notify import unreadable
from trainmaster.core.errors import JobFinal, JobOpen
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Stage, Status, TargetState
from trainmaster.storage import open_store
from trainmaster.store import attempts, jobs
from trainmaster.store import tables as t
from trainmaster.store.database import Database
from trainmaster.store.heads import JobHead, find_head
from trainmaster.store.rows import JobRow
from trainmaster.store.stand_ins import salvage

NO_ATTEMPT = {"attempt": "00000000-0000-4000-8000-000000000000.1"}


def head(db: Database, job: JobRow) -> JobHead:
    found = find_head(db, job.id)
    assert found is not None
    return found


def _submit(db: Database, target: Shared | Target, word: str = "local") -> JobRow:
    mapping = {"name": "a", "target": word, "command": ["x"], "preflight": {"level": 0}}
    return submitting.submit(db, parse_spec(mapping), load=lambda _: target)


@pytest.mark.both_databases
@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("why", [Reason.USER_CANCELLED, Reason.OVER_BUDGET])
def test_one_that_must_stop_is_stopped_and_no_other(kind: str, why: Reason, db: Database, tmp_path: Path) -> None:
    target = Shared(2)
    bad, good = (_submit(db, target) for _ in range(2))
    if (db.engine.dialect.name, kind) == ("postgresql", "no JSON"):
        assert not is_stored(db, bad.id, kind)
        return
    with driven(db, tmp_path, open_store(tmp_path / "s"), load=target.load, rest_s=at_once):
        wait(lambda: all(head(db, job).stage == Stage.RUNNING for job in (bad, good)))
        spoil(db, bad.id, kind)
        if why is Reason.USER_CANCELLED:
            assert submitting.cancel(db, bad.id).status == Status.CANCELLING
        else:
            with db.write() as conn:
                assert attempts.request_stop(conn, f"{bad.id}.1", reason=why, message="spent", at=bad.created_at)
        wait(lambda: head(db, bad).final)
    status = Status.CANCELLED if why is Reason.USER_CANCELLED else Status.FAILED
    assert (head(db, bad).status, head(db, bad).reason) == (status, why)
    assert set(target.holds) == {f"{good.id}.1"} and set(target.stopped) == {f"{bad.id}.1"}
    assert ("release", f"{good.id}.1") not in target.calls and head(db, good).stage == Stage.RUNNING
    with pytest.raises(JobFinal):
        submitting.cancel(db, bad.id)


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cancelled", [True, False])
def test_its_rented_machine_is_terminated(kind: str, cancelled: bool, db: Database, tmp_path: Path) -> None:
    """By a cancel, and where its attempt was over before the spec could not be read."""
    cloud = Cloud()
    target = Target(cloud)
    target.boxes.polls = [RUNNING]
    bad, good = (_submit(db, target, "lambda") for _ in range(2))
    with driven(db, tmp_path, open_store(tmp_path / "s"), load=lambda _: target, rest_s=at_once):
        wait(lambda: all(head(db, job).stage == Stage.RUNNING for job in (bad, good)))
        spoil(db, bad.id, kind)
        if cancelled:
            # What a scripted target does at a cancel it does to all: here only one attempt was asked to stop.
            stops: list[str] = []

            async def cancel(handle: dict[str, str], *, reason: str) -> None:
                stops.append(handle["attempt"])

            target.boxes.cancel = cancel  # type: ignore[assignment, method-assign]
            submitting.cancel(db, bad.id)
            wait(lambda: bool(stops))
            with db.write() as conn:  # all its time to save is over
                long_ago = bad.created_at.replace(year=2020)
                conn.execute(update(t.jobs).where(t.jobs.c.id == bad.id).values(cancel_at=long_ago))
        else:
            with db.write() as conn:
                report = {"report": TargetState.SUCCEEDED, "reason": None, "message": "", "exit_record": None}
                attempts.end_attempt(conn, f"{bad.id}.1", **report, at=bad.created_at)  # type: ignore[arg-type]
                jobs.advance(conn, bad.id, seen=Stage.RUNNING, to=Stage.COLLECTING, at=bad.created_at)
        wait(lambda: head(db, bad).final)
    assert head(db, bad).status == (Status.CANCELLED if cancelled else Status.COMPLETED)
    left = [instance.label for instance in cloud.instances.values()]
    assert [each.attempt for each in left if each is not None] == [f"{good.id}.1"]
    assert head(db, good).stage == Stage.RUNNING and attempts.list_held(db) == []


def test_processes_here_are_ended(db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"))
    bad, good = (submit_here(db, SLEEP, limits={"grace_s": 1}) for _ in range(2))
    with driven(db, tmp_path, open_store(tmp_path / "s")):
        wait(lambda: all(len(processes_of(f"{job.id}.1")) >= 2 for job in (bad, good)))
        spoil(db, bad.id, "no JSON")
        submitting.cancel(db, bad.id)
        wait(lambda: head(db, bad).status == Status.CANCELLED)
        assert processes_of(f"{bad.id}.1") == [] and len(processes_of(f"{good.id}.1")) >= 2
        submitting.cancel(db, good.id)
        wait(lambda: head(db, good).final)


@pytest.mark.parametrize("handle", [NO_ATTEMPT, ["x"], None])
def test_a_handle_that_is_not_its_own_ends_nothing(handle: object, db: Database, tmp_path: Path) -> None:
    target = Shared(2)
    bad, good = (_submit(db, target) for _ in range(2))
    with driven(db, tmp_path, open_store(tmp_path / "s"), load=target.load, rest_s=at_once):
        wait(lambda: all(head(db, job).stage == Stage.RUNNING for job in (bad, good)))
        spoil(db, bad.id, "newer field")
        wrong = {"attempt": f"{good.id}.1"} if handle is NO_ATTEMPT else handle
        with db.write() as conn:
            conn.execute(update(t.attempts).where(t.attempts.c.job_id == bad.id).values(handle=wrong))
        submitting.cancel(db, bad.id)
        wait(lambda: head(db, bad).message == unreadable.NOT_STOPPED)
    assert target.stopped == {} and len(target.holds) == 2


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("kind", KINDS)
def test_an_ended_one_is_deleted_and_an_open_one_is_not(kind: str, db: Database, tmp_path: Path) -> None:
    store = open_store(tmp_path / "s")
    job = _submit(db, Shared(1))
    spoil(db, job.id, kind)
    with pytest.raises(JobOpen, match="cancel it and wait"):
        maintain.delete_job(db, store, tmp_path, job.id, by="x")
    with db.write() as conn:
        jobs.finish(conn, job.id, seen=Stage.QUEUED, status=Status.CANCELLED, at=job.created_at)
    maintain.delete_job(db, store, tmp_path, job.id, by="x")
    assert find_head(db, job.id) is None


def test_what_can_be_read_of_a_spec_counts() -> None:
    limits = {"grace_s": 7, "retry": {"node_lost": False}, "attempts": "three", "of_tomorrow": 1}
    spec = salvage(json.dumps({"name": 5, "of_tomorrow": {}, "limits": limits, "zone": "Europe/Berlin"}))
    assert (spec.limits.grace_s, spec.limits.retry, spec.limits.attempts) == (7.0, {"node_lost": False}, 1)
    assert spec.zone == "Europe/Berlin"
    for stored in ("", "{", "[1]", '{"limits": 5, "zone": 5}', "[" * 5000):
        assert salvage(stored).limits.grace_s == 30.0 and salvage(stored).zone is None
