"""Queries of what the lines say of the training: iterations, their steps and epochs, evaluations, checks, artifacts."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import bindparam, func, select

from trainmaster.store import records as r
from trainmaster.store import tables as t
from trainmaster.store.database import Database
from trainmaster.store.rows import ArtifactRow, CheckRow, EpochRow, EvalRow, IterationRow, StepRow

# What the details of a job ask for, put together once.
_OF_JOB = r.iterations.c.job_id == bindparam("job")
_ITERATIONS = select(r.iterations).where(_OF_JOB).order_by(r.iterations.c.number)
_STEPS = (
    select(r.steps)
    .join(r.iterations, r.iterations.c.id == r.steps.c.iteration_id)
    .where(_OF_JOB)
    .order_by(r.iterations.c.number, r.steps.c.id)
)
_EPOCH_COUNTS = (
    select(r.epochs.c.iteration_id, func.count())
    .join(r.iterations, r.iterations.c.id == r.epochs.c.iteration_id)
    .where(_OF_JOB)
    .group_by(r.epochs.c.iteration_id)
)


def list_iterations(db: Database, job_id: str) -> list[IterationRow]:
    """The iterations of a job, in their order."""
    with db.read() as conn:
        return [IterationRow(**row) for row in conn.execute(_ITERATIONS, {"job": job_id}).mappings()]


def find_iteration(db: Database, job_id: str, number: int) -> IterationRow | None:
    query = select(r.iterations).where(r.iterations.c.job_id == job_id, r.iterations.c.number == number)
    with db.read() as conn:
        row = conn.execute(query).mappings().first()
    return IterationRow(**row) if row is not None else None


def list_steps(db: Database, job_id: str) -> list[StepRow]:
    """The steps of all iterations of a job, by iteration and then as they began."""
    with db.read() as conn:
        return [StepRow(**row) for row in conn.execute(_STEPS, {"job": job_id}).mappings()]


def list_epochs(db: Database, iteration_id: int, *, limit: int = 1000, offset: int = 0) -> list[EpochRow]:
    """The epochs of an iteration, in their order."""
    query = select(r.epochs).where(r.epochs.c.iteration_id == iteration_id).order_by(r.epochs.c.number)
    with db.read() as conn:
        return [EpochRow(**row) for row in conn.execute(query.limit(limit).offset(offset)).mappings()]


def count_epochs(db: Database, iteration_id: int) -> int:
    query = select(func.count()).select_from(r.epochs).where(r.epochs.c.iteration_id == iteration_id)
    with db.read() as conn:
        return int(conn.execute(query).scalar_one())


def list_evals(
    db: Database,
    *,
    job_id: str | None = None,
    model_id: str | None = None,
    project: str | None = None,
    limit: int = 50,
    offset: int = 0,
) -> list[EvalRow]:
    """Evaluations, newest first: of a job, of a model, of a project, or all."""
    query = select(r.evals).order_by(r.evals.c.id.desc())
    if job_id is not None:
        query = query.where(r.evals.c.job_id == job_id)
    if model_id is not None:
        query = query.where(r.evals.c.model_id == model_id)
    if project is not None:
        query = query.join(t.jobs, t.jobs.c.id == r.evals.c.job_id).where(t.jobs.c.project == project)
    with db.read() as conn:
        return [EvalRow(**row) for row in conn.execute(query.limit(limit).offset(offset)).mappings()]


def list_checks(db: Database, job_id: str) -> list[CheckRow]:
    """The checks of all attempts of a job, in the order of the attempts."""
    query = (
        select(r.check_results)
        .join(t.attempts, t.attempts.c.id == r.check_results.c.attempt)
        .where(t.attempts.c.job_id == job_id)
        .order_by(t.attempts.c.number, r.check_results.c.node, r.check_results.c.id)
    )
    with db.read() as conn:
        return [CheckRow(**row) for row in conn.execute(query).mappings()]


def list_artifacts(db: Database, job_id: str) -> list[ArtifactRow]:
    """What is kept of a job, by path."""
    query = select(r.artifacts).where(r.artifacts.c.job_id == job_id).order_by(r.artifacts.c.path)
    with db.read() as conn:
        return [ArtifactRow(**row) for row in conn.execute(query).mappings()]


def count_epochs_by_iteration(db: Database, job_id: str) -> dict[int, int]:
    """How many epochs each iteration of a job has, by the iteration's id; one without any is not named."""
    with db.read() as conn:
        return {row[0]: row[1] for row in conn.execute(_EPOCH_COUNTS, {"job": job_id})}


def list_iteration_numbers(db: Database, ids: Collection[int]) -> dict[int, int]:
    """The number of each of these iterations, by its id."""
    query = select(r.iterations.c.id, r.iterations.c.number).where(r.iterations.c.id.in_(set(ids)))
    with db.read() as conn:
        return {row[0]: row[1] for row in conn.execute(query)}


def find_artifact(db: Database, job_id: str, path: str) -> ArtifactRow | None:
    query = select(r.artifacts).where(r.artifacts.c.job_id == job_id, r.artifacts.c.path == path)
    with db.read() as conn:
        row = conn.execute(query).mappings().first()
    return ArtifactRow(**row) if row is not None else None
