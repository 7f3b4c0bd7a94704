"""Queries of training records: iterations with their phases and epochs, and evaluations."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

from sqlalchemy import bindparam, func, select

from trainmaster.api.iterations import Epoch
from trainmaster.store import tables as t
from trainmaster.store.database import Database
from trainmaster.store.rows import EvalRow, IterationRow, StepRow

# What the details of a job ask for, put together once.
_OF_JOB = t.iterations.c.job_id == bindparam("job")
_ITERATION = select(*(t.iterations.c[item.name] for item in fields(IterationRow)))
_ITERATIONS = _ITERATION.where(_OF_JOB).order_by(t.iterations.c.number)
_STEPS = (
    select(*(t.steps.c[item.name] for item in fields(StepRow)))
    .join(t.iterations, t.iterations.c.id == t.steps.c.iteration_id)
    .where(_OF_JOB)
    .order_by(t.iterations.c.number, t.steps.c.id)
)
_EPOCH_COUNTS = (
    select(t.epochs.c.iteration_id, func.count())
    .join(t.iterations, t.iterations.c.id == t.epochs.c.iteration_id)
    .where(_OF_JOB)
    .group_by(t.epochs.c.iteration_id)
)


def list_iterations(db: Database, job_id: str) -> list[IterationRow]:
    """The iterations of a job, in their order."""
    return [IterationRow(**row) for row in db.mappings(_ITERATIONS, {"job": job_id})]


def find_iteration(db: Database, job_id: str, number: int) -> IterationRow | None:
    query = _ITERATION.where(t.iterations.c.job_id == job_id, t.iterations.c.number == number)
    row = db.first(query)
    return IterationRow(**row) if row is not None else None


def list_steps(db: Database, job_id: str) -> list[StepRow]:
    """The steps of all iterations of a job, by iteration and then as they began."""
    return [StepRow(**row) for row in db.mappings(_STEPS, {"job": job_id})]


def list_epochs(db: Database, iteration_id: int, *, limit: int = 1000, offset: int = 0) -> list[Epoch]:
    """The epochs of an iteration, in their order."""
    query = select(t.epochs).where(t.epochs.c.iteration_id == iteration_id).order_by(t.epochs.c.number)
    return [Epoch(**row) for row in db.mappings(query.limit(limit).offset(offset))]


def count_epochs(db: Database, iteration_id: int) -> int:
    query = select(func.count()).select_from(t.epochs).where(t.epochs.c.iteration_id == iteration_id)
    return int(db.scalar(query))


def list_evals(
    db: Database,
    *,
    job_id: str | None = None,
    model_id: str | None = None,
    project: str | None = None,
    limit: int = 50,
    offset: int = 0,
    after: int | None = None,
) -> list[EvalRow]:
    """Evaluations, newest first: of a job, of a model, of a project, or all; behind the one with the id `after`."""
    query = select(t.evals).order_by(t.evals.c.id.desc())
    if after is not None:
        query = query.where(t.evals.c.id < after)
    exact = ((t.evals.c.job_id, job_id), (t.evals.c.model_id, model_id))
    query = query.where(*(column == value for column, value in exact if value is not None))
    if project is not None:
        query = query.join(t.jobs, t.jobs.c.id == t.evals.c.job_id).where(t.jobs.c.project == project)
    return [EvalRow(**row) for row in db.mappings(query.limit(limit).offset(offset))]


def count_epochs_by_iteration(db: Database, job_id: str) -> dict[int, int]:
    """How many epochs each iteration of a job has, by the iteration's id; one without any is not named."""
    return {row[0]: row[1] for row in db.rows(_EPOCH_COUNTS, {"job": job_id})}


def list_iteration_numbers(db: Database, ids: Collection[int]) -> dict[int, int]:
    """The number of each of these iterations, by its id."""
    query = select(t.iterations.c.id, t.iterations.c.number).where(t.iterations.c.id.in_(set(ids)))
    return {row[0]: row[1] for row in db.rows(query)}
