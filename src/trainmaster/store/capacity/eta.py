"""Progress and remaining time of running jobs, from the step or epoch events of their last attempt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import func, select

from trainmaster.core.money.cost import Mark, left_s
from trainmaster.core.plan import EVENTS_FILE
from trainmaster.store import tables as t
from trainmaster.store.database import Database
from trainmaster.store.rows import JobRow

# Names that training configs use for them; tests/seed_004.md prescribes none.
_EPOCHS = ("epochs", "num_epochs", "no_epochs", "n_epochs", "total_epochs", "max_epochs")
_ITERATIONS = ("iterations", "num_iterations", "no_iterations", "n_iterations", "total_iterations", "max_iterations")


def list_left(db: Database, jobs: Sequence[JobRow], *, now: datetime) -> dict[str, float]:
    """Seconds until the end of each of these jobs whose pace and goal are known; none for one that is over."""
    seconds_left = {job.id: 0.0 for job in jobs if job.stage is None}
    going = {job.id: job for job in jobs if job.stage is not None and job.attempts}
    if not going:
        return seconds_left
    steps, epochs = _steps(db, going), _epochs(db, [job for job in going.values() if job.training_config])
    for job in going.values():
        marks, total = steps.get(job.id, ([], None))
        left = left_s(marks, total or (job.spec.train.steps if job.spec.train else None), now=now)
        if left is None:
            left = left_s(*_whole_way(job, epochs.get(job.id, ())), now=now)
        if left is not None:
            seconds_left[job.id] = left
    return seconds_left


def list_timeouts(db: Database, jobs: Sequence[JobRow], *, now: datetime) -> dict[str, float]:
    """Seconds until `limits.timeout_s` and the grace end the present attempt of each of these jobs that states one."""
    limited = {job.id: job.spec.limits for job in jobs if job.spec.limits.timeout_s is not None}
    query = select(t.jobs.c.id, t.attempts.c.started_at).join(
        t.attempts, (t.attempts.c.job_id == t.jobs.c.id) & (t.attempts.c.number == t.jobs.c.attempts)
    )
    rows = db.rows(query.where(t.jobs.c.id.in_(list(limited)))) if limited else ()
    lasted_s = {job: (now - started).total_seconds() if started is not None else 0.0 for job, started in rows}
    return {
        job: max(0.0, (limits.timeout_s or 0.0) + limits.grace_s - lasted_s.get(job, 0.0))
        for job, limits in limited.items()
    }


def _steps(db: Database, jobs: Iterable[str]) -> dict[str, tuple[list[Mark], float | None]]:
    """The first and the last STEP of each job's last attempt, and the steps that it means to make."""
    e, other = t.events, t.events.alias("other")
    of_attempt = (other.c.attempt == t.attempts.c.id, other.c.stream == EVENTS_FILE, other.c.phase == "STEP")
    # Both are one walk down the index, however long the stream is.
    ends = [select(pick(other.c.offset)).where(*of_attempt).scalar_subquery() for pick in (func.min, func.max)]
    query = (
        select(t.jobs.c.id, e.c.ts, e.c.data)
        .join(t.attempts, (t.attempts.c.job_id == t.jobs.c.id) & (t.attempts.c.number == t.jobs.c.attempts))
        .join(e, (e.c.attempt == t.attempts.c.id) & (e.c.stream == EVENTS_FILE) & e.c.offset.in_(ends))
        .where(t.jobs.c.id.in_(list(jobs)))
    )
    by_job: dict[str, tuple[list[Mark], float | None]] = {}
    for job_id, at, data in db.rows(query):
        step, total = _count(data, ("step",)), _count(data, ("steps",))
        if step is not None and at is not None:
            marks, before = by_job.get(job_id, ([], None))
            by_job[job_id] = ([*marks, Mark(at=at, done=step)], total or before)
    return by_job


def _epochs(db: Database, jobs: Sequence[JobRow]) -> dict[str, list[tuple[int, int, datetime]]]:
    """(iteration, epoch, time) of the epoch events of each job's last attempt."""
    if not jobs:
        return {}
    query = (
        select(t.iterations.c.job_id, t.iterations.c.number, t.epochs.c.number, t.epochs.c.at)
        .join(t.epochs, t.epochs.c.iteration_id == t.iterations.c.id)
        .where(t.iterations.c.job_id.in_([job.id for job in jobs]), t.epochs.c.at.is_not(None))
        .where(t.epochs.c.attempt.in_([f"{job.id}.{job.attempts}" for job in jobs]))
    )
    by_job: dict[str, list[tuple[int, int, datetime]]] = {}
    for job_id, iteration, epoch, at in db.rows(query):
        by_job.setdefault(job_id, []).append((iteration, epoch, at))
    return by_job


def _whole_way(job: JobRow, ended_epochs: Iterable[tuple[int, int, datetime]]) -> tuple[list[Mark], float | None]:
    config = job.training_config or {}
    epochs, iterations = _count(config, _EPOCHS), _count(config, _ITERATIONS)
    if epochs is None:
        return [], None
    marks = [Mark(at=at, done=(iteration - 1) * epochs + epoch) for iteration, epoch, at in ended_epochs]
    return marks, epochs * (iterations or 1)


def _count(data: Mapping[str, Any] | None, names: Sequence[str]) -> float | None:
    values = ((data or {}).get(name) for name in names)
    return next((float(x) for x in values if isinstance(x, int) and not isinstance(x, bool) and 0 < x < 2**53), None)
