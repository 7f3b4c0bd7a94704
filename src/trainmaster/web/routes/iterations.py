"""Records of a training: iterations with their phases, epochs, evaluations, checks."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query
from starlette.responses import Response

from trainmaster.api.codec import fill
from trainmaster.api.iterations import Checks, Details, Epochs, Evaluation, Evaluations
from trainmaster.core.ids import UUID_PATTERN
from trainmaster.pages import checks, details
from trainmaster.pages.jobs import MOST
from trainmaster.store.page_rows import iterations
from trainmaster.web import dependencies
from trainmaster.web.errors import Refused, not_found
from trainmaster.web.routes import TRAINING, group, reply

router = group("records", prefix=TRAINING)
Number = Annotated[int, Path(alias="n", ge=0, le=2**63 - 1, description="number of the iteration, from 1")]
JobFilter = Annotated[str | None, Query(pattern=f"^{UUID_PATTERN}$", description="evaluations of this job")]
ModelFilter = Annotated[
    str | None, Query(pattern=r"^[^\x00]{1,1024}$", description="evaluations of this model")
]  # PostgreSQL has no NUL in a text


@router.get("/jobs/{uuid}/details", response_model=Details)
def find_details(job: dependencies.Job, db: dependencies.Db) -> Response:
    """A job with its iterations, their phases and their numbers of epochs."""
    page = details.read(db, job.id)
    if page is None:
        raise not_found(job.id)
    return reply(page)


@router.get("/jobs/{uuid}/iterations/{n}/epochs", response_model=Epochs)
def list_epochs(
    job: dependencies.Job,
    number: Number,
    db: dependencies.Db,
    limit: Annotated[int, Query(ge=1, le=1000, description="maximum number of results")] = 1000,
    offset: dependencies.Offset = 0,
) -> Response:
    """The epochs of one iteration, in order. 404 if the job has no such iteration."""
    iteration = iterations.find_iteration(db, job.id, number)
    if iteration is None:
        raise Refused(404, "not_found", f"job {job.id} has no iteration {number}")
    rows = iterations.list_epochs(db, iteration.id, limit=limit, offset=offset)
    total = iterations.count_epochs(db, iteration.id)
    return reply(Epochs(job_id=job.id, iteration=number, total=total, epochs=tuple(rows)))


@router.get("/evaluations", response_model=Evaluations)
def list_evaluations(
    *,
    db: dependencies.Db,
    project: dependencies.Project,
    model_id: ModelFilter = None,
    job_id: JobFilter = None,
    limit: Annotated[int, Query(ge=1, le=MOST, description="maximum number of results")] = 50,
    offset: dependencies.Offset = 0,
    after: Annotated[int | None, Query(ge=0, le=2**63 - 1, description="cursor: `next` of the last answer")] = None,
) -> Response:
    """Evaluations, newest first, filtered by model, job or project.

    `after` gives the page behind a cursor: none comes twice while others are recorded, as it does with `offset`.
    """
    rows = iterations.list_evals(
        db, job_id=job_id, model_id=model_id, project=project, limit=limit, offset=offset, after=after
    )
    numbers = iterations.list_iteration_numbers(db, [row.iteration_id for row in rows])
    evaluations = tuple(fill(Evaluation, row, iteration=numbers[row.iteration_id]) for row in rows)
    following = rows[-1].id if rows else None
    return reply(Evaluations(evaluations=evaluations, limit=limit, offset=offset, next=following))


@router.get("/jobs/{uuid}/checks", response_model=Checks)
def list_checks(job: dependencies.Job, db: dependencies.Db) -> Response:
    """Pre-flight checks on each node of each attempt."""
    return reply(checks.read(db, job.id))
