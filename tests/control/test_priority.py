"""A changed priority moves a waiting job in our own queue, keeps its age, and is refused where it decides nothing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from control.driving import wait
from control.test_dispatch import Shared, _driven, _find, _runs, _submit
from trainmaster.control import submit as submitting
from trainmaster.control.queueing import dispatch, priority
from trainmaster.core.config.queue import PRIORITIES
from trainmaster.core.errors import JobMissing, NotWaiting, SpecError
from trainmaster.core.states import Stage, Status
from trainmaster.pages import queue as queue_page
from trainmaster.queueing.state import Device
from trainmaster.store import audit, jobs, leases
from trainmaster.store.capacity import devices, queue
from trainmaster.store.database import Database
from trainmaster.targets import find_place, names, waits_here


@pytest.mark.both_databases
def test_the_job_that_was_raised_starts_first(db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_UNCHANGED", 1e9)  # a pass is made again for a change alone
    target = Shared(1)
    first, second, third = (_submit(db, target, f"j{n}") for n in range(3))
    with _driven(db, tmp_path, target):
        wait(lambda: _runs(db, first) and all(_find(db, job).message for job in (second, third)))
        assert [line.job_id for line in queue_page.read(db).jobs] == [second.id, third.id]
        priority.change(db, third.id, "high", by="ann")
        wait(lambda: [line.job_id for line in queue_page.read(db).jobs] == [third.id, second.id])
        target.ends.add(first.id)
        wait(lambda: _runs(db, third))
        assert _find(db, second).stage is Stage.QUEUED
        target.ends |= {second.id, third.id}
        wait(lambda: all(_find(db, job).status is Status.COMPLETED for job in (second, third)))
    assert target.started == [f"{job.id}.1" for job in (first, third, second)] and target.faults == []


def _waiting(db: Database, *, waited_s: float = 0.0, **spec: object) -> str:
    job = submitting.submit(db, submitting.replace(_SPEC, **spec))  # type: ignore[arg-type]
    since = datetime.now(UTC) - timedelta(seconds=waited_s)
    with db.write() as conn:
        conn.execute(jobs.t.jobs.update().where(jobs.t.jobs.c.id == job.id).values(stage_since=since, created_at=since))
        leases.take(conn, "t", owner="a test")
    return job.id


_SPEC = submitting.JobSpec(name="j", command=("x",))


def test_what_it_has_waited_counts_as_before(db: Database) -> None:
    with db.write() as conn:
        devices.record(conn, find_place("local"), "gpu", [Device(id="GPU-0", machine="m0", used="python")], at=_NOW)
    old, raised = _waiting(db, waited_s=7 * 3600), _waiting(db, waited_s=13 * 3600)
    priority.change(db, raised, "low")  # 0 + 2 for its age, and 1 + 1 of the other: of two alike the older
    assert [line.job_id for line in queue_page.read(db).jobs] == [raised, old]
    priority.change(db, old, "high")
    first, second = queue_page.read(db).jobs
    assert [(first.job_id, first.priority), (second.job_id, second.priority)] == [(old, "high"), (raised, "low")]
    assert _NOW - first.since > timedelta(hours=6)


_NOW = datetime.now(UTC)


def test_who_changed_it_from_what_to_what_is_audited_once(db: Database) -> None:
    job = _waiting(db)
    stamp = queue.read_stamp(db, ["local"])
    assert priority.change(db, job, "high", by="ann").spec.queue.priority == "high"
    assert queue.read_stamp(db, ["local"]) != stamp, "or no pass would be made for it"
    assert priority.change(db, job, "high", by="bob").spec.queue.priority == "high"
    last, submitted = audit.list_audit(db, subject=f"job:{job}")
    assert (last.who, last.action, last.detail) == ("ann", "job.priority", {"from": "normal", "to": "high"})
    assert submitted.action == "job.submit"


def test_it_is_refused_in_words_where_it_decides_nothing(db: Database) -> None:
    with pytest.raises(JobMissing):
        priority.change(db, "00000000-0000-4000-8000-000000000009", "high")
    job = _waiting(db)
    with pytest.raises(SpecError, match=r"queue.priority: 'soon' is no priority .* low, normal, high, urgent"):
        priority.change(db, job, "soon")
    with db.write() as conn:
        jobs.advance(conn, job, seen=Stage.QUEUED, to=Stage.PLACING, at=_NOW)
    with pytest.raises(NotWaiting, match="has its machines already; only the priority of a job that waits"):
        priority.change(db, job, "high")
    ended = _waiting(db)
    submitting.cancel(db, ended)
    with pytest.raises(NotWaiting, match="is being cancelled"):
        priority.change(db, ended, "high")
    with db.write() as conn:
        jobs.finish(conn, ended, seen=Stage.QUEUED, status=Status.CANCELLED, at=_NOW)
    with pytest.raises(NotWaiting, match="is already cancelled; its priority decides nothing any more"):
        priority.change(db, ended, "high")
    assert {entry.action for entry in audit.list_audit(db)} == {"job.submit", "job.cancel"}


def test_a_target_that_queues_by_itself_is_refused(db: Database) -> None:
    assert {name for name in names() if waits_here(name)} == {"local", "ssh", "pool", "lambda"}
    assert waits_here("ssh:hosts.yaml") and not waits_here("no-such-target")
    job = _waiting(db)
    with db.write() as conn:
        conn.execute(jobs.t.jobs.update().values(target="slurm:secret.yaml"))
    with pytest.raises(NotWaiting, match=r"is of slurm, .* submit it again with queue.priority=high") as refused:
        priority.change(db, job, "high")
    assert "secret" not in str(refused.value)


def test_every_priority_can_be_given(db: Database) -> None:
    job = _waiting(db)
    assert [priority.change(db, job, word).spec.queue.priority for word in PRIORITIES] == list(PRIORITIES)
