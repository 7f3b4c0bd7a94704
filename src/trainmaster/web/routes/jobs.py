"""Jobs: list, look at, submit, cancel."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import Header, Request
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from trainmaster import control
from trainmaster.api.jobs import Attempts, Job, JobPage, JobsPage
from trainmaster.core.roles import Role
from trainmaster.core.spec import parse_spec
from trainmaster.pages import attempts
from trainmaster.pages import jobs as jobs_page
from trainmaster.pages.parts import shapes
from trainmaster.store.rows import JobRow
from trainmaster.web import dependencies
from trainmaster.web.auth import need
from trainmaster.web.errors import Refused, not_found
from trainmaster.web.openapi import SPEC_BODY
from trainmaster.web.routes import TRAINING, group, reply

router = group("jobs", prefix=f"{TRAINING}/jobs")
Key = Annotated[
    str | None,
    Header(pattern=r"^[\x21-\x7e]{1,255}$", description="names this submission: sent again, it gives the same job"),
]


@router.get("", response_model=JobsPage)
def list_jobs(
    *,
    db: dependencies.Db,
    project: dependencies.Project,
    status: dependencies.StatusWord = None,
    find: dependencies.Find = None,
    limit: dependencies.Limit = 50,
    offset: dependencies.Offset = 0,
) -> Response:
    """Jobs, newest first, and how many there are of each status."""
    return reply(jobs_page.read(db, status=status, project=project, find=find, limit=limit, offset=offset))


@router.post(
    "",
    response_model=Job,
    status_code=201,
    openapi_extra=SPEC_BODY,
    responses={200: {"model": Job, "description": "It was submitted before, with this key"}},
)
async def submit_job(
    request: Request, db: dependencies.Db, who: dependencies.User, idempotency_key: Key = None
) -> Response:
    """A spec as JSON becomes a queued job; every fault of it is named at once.

    With `Idempotency-Key` it can be sent again safely: the same spec gives the same job (200), another gives 409.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, "not_json", "send the spec as application/json")
    try:
        body = await request.body()
    except ClientDisconnect as gone:
        raise Refused(413, "too_large", "the body is too large, or was cut off") from gone
    with dependencies.creating():
        spec = parse_spec(_parse(body))
        need(who, Role.USER, project=spec.project)
        row, new = await run_in_threadpool(control.submit_once, db, spec, key=idempotency_key, by=who.name)
    return _created(row, new=new)


@router.get("/{uuid}", response_model=JobPage)
def find_job(job: dependencies.Job, live: dependencies.Live) -> Response:
    """Everything the page of a job shows."""
    page = live.read(job.id)
    if page is None:
        raise not_found(job.id)
    return reply(page)


@router.post("/{uuid}/cancel", response_model=Job)
def cancel_job(job: dependencies.Job, db: dependencies.Db, who: dependencies.User) -> Response:
    """Ask a job to save and stop. 400 if it is over."""
    return reply(shapes.job(dependencies.cancel(db, job, who)))


@router.post(
    "/{uuid}/resume",
    response_model=Job,
    status_code=201,
    responses={200: {"model": Job, "description": "It was resumed before, with this key"}},
)
def resume_job(
    job: dependencies.Job, db: dependencies.Db, who: dependencies.User, idempotency_key: Key = None
) -> Response:
    """A new job with the spec of one that is over, which goes on from its last checkpoint. 409 while that one runs."""
    with dependencies.creating():
        row, new = control.resume(db, job.id, key=idempotency_key, by=who.name)
    return _created(row, new=new)


@router.get("/{uuid}/attempts", response_model=Attempts)
def list_attempts(job: dependencies.Job, db: dependencies.Db) -> Response:
    """Every try of a job, and how it ended."""
    return reply(attempts.read(db, job.id))


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as wrong:
        raise Refused(400, "not_json", f"the body is not JSON: {wrong}") from wrong


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON number")


def _created(row: JobRow, *, new: bool) -> Response:
    return reply(shapes.job(row), status_code=201 if new else 200, headers={"Location": f"{TRAINING}/jobs/{row.id}"})
