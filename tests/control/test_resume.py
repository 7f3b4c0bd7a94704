"""`resume`: a new job that goes on with the checkpoints of one that is over, and every way in which it must not."""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path
from typing import Any

import pytest

from trainmaster.control import submit as submitting
from trainmaster.core.errors import JobFinal, JobMissing, JobOpen, SpecError
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Status
from trainmaster.store import attempts, events, jobs
from trainmaster.store.database import Database
from trainmaster.store.rows import JobRow

from .test_local_jobs import SOURCE, reconcile

TRAIN: dict[str, Any] = {
    "model": {"layers": 1, "width": 16, "heads": 2}, "data": {"source": "tales"}, "sequence_tokens": 32,
    "batch_sequences": 2, "log_every_steps": 1, "device": "cpu", "checkpoint": {"every_steps": 5},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _agents_find_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", SOURCE)


def submit(db: Database, **more: Any) -> JobRow:
    return submitting.submit(db, parse_spec({"name": "run", "preflight": {"level": 0}, "command": ["true"], **more}))


def end(db: Database, job: JobRow) -> None:
    """As if its machine had been lost: nobody knows what it saved."""
    with db.write() as conn:
        assert job.stage is not None
        attempts.insert_attempt(conn, job.id, 1, handle=None, at=job.created_at)
        jobs.finish(conn, job.id, seen=job.stage, status=Status.CANCELLED, at=job.created_at)


@pytest.mark.matrix(one_in=10, of="acceptance, collectives and jobs of real ranks")
def test_a_cancelled_training_goes_on_where_it_saved(db: Database, tmp_path: Path) -> None:
    spec = {"name": "run", "preflight": {"level": 0}, "train": {**TRAIN, "steps": 100_000}}
    first = submitting.submit(db, parse_spec(spec))

    def cancel_after_a_save() -> None:
        if list((tmp_path / "jobs" / first.id / "checkpoints").glob("step-*/manifest.json")):
            with contextlib.suppress(JobFinal):
                submitting.cancel(db, first.id)

    (first,) = reconcile(db, tmp_path, first, act=cancel_after_a_save)
    assert first.status is Status.CANCELLED and first.reason is not None
    assert "trainmaster resume" in first.reason.rule.action
    saved = max(event.data["step"] for event in events.list_events(db, first.id) if event.phase == "STEP")

    longer = {**spec, "train": {**TRAIN, "steps": saved + 10}, "resume_from": first.id}
    (second,) = reconcile(db, tmp_path, submitting.submit(db, parse_spec(longer)))
    assert second.status is Status.COMPLETED, second.message
    steps = [event.data["step"] for event in events.list_events(db, second.id) if event.phase == "STEP"]
    assert steps == list(range(saved + 1, saved + 11))  # a stop saves: not one step is done twice

    third, _ = submitting.resume(db, second.id)  # nothing is left to do, and it is the same run
    assert third.spec.resume_from == first.id
    (third,) = reconcile(db, tmp_path, third)
    assert third.status is Status.COMPLETED
    assert not [event for event in events.list_events(db, third.id) if event.phase == "STEP"]


def test_without_a_checkpoint_there_is_no_new_run_in_its_place(db: Database, tmp_path: Path) -> None:
    (first,) = reconcile(db, tmp_path, submit(db, command=["false"]))
    assert first.status is Status.FAILED
    with pytest.raises(SpecError, match=f"saved no checkpoint; run it again: trainmaster resume --again {first.id}"):
        submitting.resume(db, first.id)
    assert jobs.count_jobs(db) == 1


def test_the_agent_refuses_where_the_files_are_gone_since(db: Database, tmp_path: Path) -> None:
    (first,) = reconcile(db, tmp_path, submit(db, command=["sh", "-c", 'touch "$TRAINMASTER_CHECKPOINTS/x"; exit 1']))
    (tmp_path / "jobs" / first.id / "checkpoints" / "x").unlink()
    (second,) = reconcile(db, tmp_path, submitting.resume(db, first.id)[0])
    assert (second.status, second.reason) == (Status.FAILED, Reason.BAD_CHECKPOINT)
    assert first.id in second.message and "without resume_from" in second.message


def test_a_command_that_never_started_has_nothing_to_resume(db: Database) -> None:
    first = submit(db)
    with db.write() as conn:
        assert first.stage is not None
        jobs.finish(conn, first.id, seen=first.stage, status=Status.CANCELLED, at=first.created_at)
    with pytest.raises(SpecError, match="saved no checkpoint"):
        submitting.resume(db, first.id)


@pytest.mark.matrix(one_in=10, of="acceptance, collectives and jobs of real ranks")
def test_a_file_that_is_no_checkpoint_is_none(db: Database, tmp_path: Path) -> None:
    """The trainer itself refuses: it alone knows what is whole, and in which tier to look."""
    leave = 'touch "$TRAINMASTER_CHECKPOINTS/notes.txt"; exit 1'
    (first,) = reconcile(db, tmp_path, submit(db, command=["sh", "-c", leave]))
    spec = {"name": "run", "preflight": {"level": 0}, "train": {**TRAIN, "steps": 20}, "resume_from": first.id}
    (second,) = reconcile(db, tmp_path, submitting.submit(db, parse_spec(spec)))
    assert (second.status, second.reason) == (Status.FAILED, Reason.BAD_CHECKPOINT), second.message
    assert f"job {first.id} left no checkpoint" in second.message
    assert not [event for event in events.list_events(db, second.id) if event.phase == "STEP"]


def test_two_jobs_never_write_the_same_checkpoints(db: Database) -> None:
    first = submit(db)
    with pytest.raises(JobOpen, match=first.id):
        submitting.resume(db, first.id)
    end(db, first)
    second, _ = submitting.resume(db, first.id)
    for job in (first, second):
        with pytest.raises(JobOpen, match=second.id):
            submitting.resume(db, job.id)
    assert jobs.count_jobs(db) == 2
    end(db, second)
    assert submitting.resume(db, second.id)[0].spec.resume_from == first.id


def test_a_job_whose_checkpoints_a_later_one_has_written_over_is_not_gone_on_from(db: Database, tmp_path: Path) -> None:
    """The jobs of a run share one folder: the state of the later one would be taken under the name of the earlier."""
    save = ["sh", "-c", 'touch "$TRAINMASTER_CHECKPOINTS/$SAVES"; exit 1']
    (first,) = reconcile(db, tmp_path, submit(db, command=save, env={"SAVES": "120"}))
    (idle,) = reconcile(db, tmp_path, submit(db, command=["false"], resume_from=first.id))
    (second,) = reconcile(db, tmp_path, submit(db, command=save, env={"SAVES": "200"}, resume_from=first.id))
    assert second.status is Status.FAILED and idle.status is Status.FAILED  # one that saved nothing is no hindrance
    for job in (first, idle):
        with pytest.raises(SpecError, match=f"job {second.id} went on from {job.id} .* name that job: {second.id}"):
            submitting.resume(db, job.id)
    third, _ = submitting.resume(db, second.id, key="key")
    assert third.spec.resume_from == first.id
    end(db, third)
    again, new = submitting.resume(db, second.id, key="key")
    assert (again.id, new) == (third.id, False)
    with pytest.raises(SpecError, match=f"name that job: {third.id}"):  # nobody knows what it saved
        submitting.resume(db, second.id)


def test_the_same_key_resumes_once(db: Database) -> None:
    first = submit(db)
    end(db, first)
    second, new = submitting.resume(db, first.id, key="again")
    assert new
    assert submitting.resume(db, first.id, key="again") == (second, False)


def test_what_cannot_be_resumed_is_named(db: Database) -> None:
    first = submit(db)
    end(db, first)
    with pytest.raises(JobMissing):
        submitting.resume(db, str(uuid.uuid4()))
    with pytest.raises(SpecError, match="has no job"):
        submit(db, resume_from=str(uuid.uuid4()))
    with pytest.raises(SpecError, match="the project other has no job"):
        submit(db, resume_from=first.id, project="other")
    with pytest.raises(SpecError, match="resume_from"):
        submit(db, resume_from="../../etc")
    assert jobs.count_jobs(db) == 1
