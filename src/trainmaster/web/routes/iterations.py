"""What the training said of itself: iterations with their steps, epochs, evaluations, checks."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query
from starlette.responses import Response

from trainmaster.core.ids import UUID_PATTERN
from trainmaster.pages.job import plain_spec
from trainmaster.pages.jobs import MOST
from trainmaster.store import iterations as read_records
from trainmaster.store import nodes
from trainmaster.store.rows import EvalRow, StepRow
from trainmaster.web import answers, dependencies
from trainmaster.web.errors import Refused
from trainmaster.web.routes import TRAINING, group, reply

router = group("records", prefix=TRAINING)
Number = Annotated[int, Path(alias="n", ge=0, le=2**63 - 1, description="the iteration's number, from 1")]
JobFilter = Annotated[
    str | None,
    Query(pattern=f"^{UUID_PATTERN}$", description="only of this job"),
]
ModelFilter = Annotated[
    str | None, Query(pattern=r"^[^\x00]{1,1024}$", description="only of this model")
]  # PostgreSQL has no NUL in a text


@router.get("/jobs/{uuid}/details", response_model=answers.Details)
def find_details(job: dependencies.Job, db: dependencies.Db) -> Response:
    """A job with its iterations, their steps, and how many epochs each has."""
    steps: dict[int, list[answers.Step]] = {}
    with db.read():
        rows, epochs = read_records.list_iterations(db, job.id), read_records.count_epochs_by_iteration(db, job.id)
        for step in read_records.list_steps(db, job.id):
            steps.setdefault(step.iteration_id, []).append(_step(step))
    iterations = tuple(
        answers.Iteration(
            number=row.number, config=row.config, started_at=row.started_at, completed_at=row.completed_at,
            time_taken=row.time_taken, epochs=epochs.get(row.id, 0), steps=tuple(steps.get(row.id, ())),
        )
        for row in rows
    )  # fmt: skip
    return reply(answers.Details(job=answers.job(job, plain_spec(job.spec)), iterations=iterations))


@router.get("/jobs/{uuid}/iterations/{n}/epochs", response_model=answers.Epochs)
def list_epochs(
    job: dependencies.Job,
    number: Number,
    db: dependencies.Db,
    limit: Annotated[int, Query(ge=1, le=1000, description="at most so many")] = 1000,
    offset: dependencies.Offset = 0,
) -> Response:
    """The epochs of one iteration, in their order. 404 where the job has no such iteration."""
    iteration = read_records.find_iteration(db, job.id, number)
    if iteration is None:
        raise Refused(404, "not_found", f"job {job.id} has no iteration {number}")
    rows = read_records.list_epochs(db, iteration.id, limit=limit, offset=offset)
    total = read_records.count_epochs(db, iteration.id)
    return reply(answers.Epochs(job_id=job.id, iteration=number, total=total, epochs=tuple(rows)))


@router.get("/evaluations", response_model=answers.Evaluations)
def list_evaluations(
    *,
    db: dependencies.Db,
    project: dependencies.Project,
    model_id: ModelFilter = None,
    job_id: JobFilter = None,
    limit: Annotated[int, Query(ge=1, le=MOST, description="at most so many")] = 50,
    offset: dependencies.Offset = 0,
) -> Response:
    """Evaluations, newest first: all, of a model, of a job, of a project."""
    rows = read_records.list_evals(db, job_id=job_id, model_id=model_id, project=project, limit=limit, offset=offset)
    numbers = read_records.list_iteration_numbers(db, [row.iteration_id for row in rows])
    found = tuple(_evaluation(row, numbers[row.iteration_id]) for row in rows)
    return reply(answers.Evaluations(evaluations=found, limit=limit, offset=offset))


@router.get("/jobs/{uuid}/checks", response_model=answers.Checks)
def list_checks(job: dependencies.Job, db: dependencies.Db) -> Response:
    """What the checks before the workload found, on each node of each attempt."""
    return reply(answers.Checks(checks=tuple(nodes.list_checks(db, job.id))))


def _step(row: StepRow) -> answers.Step:
    return answers.Step(
        kind=row.kind, config=row.config, started_at=row.started_at, completed_at=row.completed_at,
        step_time=row.step_time,
    )  # fmt: skip


def _evaluation(row: EvalRow, iteration: int) -> answers.Evaluation:
    return answers.Evaluation(
        id=row.id, job_id=row.job_id, iteration=iteration, model_id=row.model_id, metrics=row.metrics, at=row.at,
        attempt=row.attempt,
    )  # fmt: skip
