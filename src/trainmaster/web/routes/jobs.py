"""Jobs: list, show, submit, cancel, resume, delete."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from trainmaster.api.jobs import Attempts, Created, Job, JobPage, JobsPage, Transitions
from trainmaster.api.webhooks import Deliveries
from trainmaster.control import budget, maintain
from trainmaster.control import submit as submitting
from trainmaster.control.queueing import priority
from trainmaster.core.errors import JobMissing, JobOpen, NotWaiting
from trainmaster.core.roles import Role
from trainmaster.core.spec import DEFAULT_PROJECT, JobSpec, parse_spec
from trainmaster.pages import deliveries, sets
from trainmaster.pages import jobs as jobs_page
from trainmaster.pages.parts import shapes
from trainmaster.store import attempts, jobs
from trainmaster.store.database import Database
from trainmaster.store.rows import JobRow
from trainmaster.web import dependencies, json_body
from trainmaster.web.auth import Caller, need
from trainmaster.web.errors import Refused, not_found
from trainmaster.web.openapi import SPEC_BODY
from trainmaster.web.rate_limit import LARGE_BYTES
from trainmaster.web.routes import TRAINING, Body, group, reply

router = group("jobs", prefix=f"{TRAINING}/jobs")
After = Annotated[str | None, Query(pattern=f"^{jobs_page.CURSOR}$", description="cursor: `next` of the last answer")]


class PriorityBody(Body):
    """Priority of a job in our own queue."""

    priority: Literal["low", "normal", "high", "urgent"]


@router.get("", response_model=JobsPage)
def list_jobs(
    *,
    db: dependencies.Db,
    project: dependencies.Project,
    status: dependencies.StatusWord = None,
    find: dependencies.Find = None,
    by: dependencies.By = None,
    name: dependencies.Named = None,
    limit: dependencies.Limit = 50,
    offset: dependencies.Offset = 0,
    after: After = None,
    alone: Annotated[bool, Query(description="leave out the trials of sets; with no other filter")] = False,
) -> Response:
    """Jobs, newest first, and the number of jobs by status.

    `after` gives the page behind a cursor: no job comes twice while others are submitted, as it does with `offset`.
    """
    if alone:
        if (status, find, by, name, after) != (None,) * 5:
            raise Refused(400, "unknown_parameter", "alone: status, find, by, name and after do not go with it")
        return reply(sets.read_folded(db, project=project, limit=limit, offset=offset))
    page = jobs_page.read(
        db, status=status, project=project, find=find, by=by, name=name, limit=limit, offset=offset, after=after
    )
    return reply(page)


@router.post(
    "",
    response_model=Created,
    status_code=201,
    openapi_extra=SPEC_BODY,
    responses={200: {"model": Created, "description": "Submitted before with this key"}},
)
async def submit_job(
    request: Request, db: dependencies.Db, who: dependencies.User, idempotency_key: dependencies.Key = None
) -> Response:
    """Submit a spec as JSON. All faults of the spec are reported at once.

    With `Idempotency-Key` a retry is safe: the same spec returns the same job (200), another spec 409.
    """
    with dependencies.creating():
        spec = await _read_spec(request, who)
        dependencies.need_trust(request, who, spec)
        run = await _find_runner(request)
        row, new = await run(submitting.submit_once, db, spec, key=idempotency_key, by=who.name)
    return _created(row, new=new, note=await run_in_threadpool(budget.note_uncounted, db, row))


@router.post("/check", status_code=204, response_class=Response, openapi_extra=SPEC_BODY)
async def check_spec(
    request: Request, db: dependencies.Db, who: dependencies.User, idempotency_key: dependencies.Key = None
) -> Response:
    """Refuse a spec as its submission would; nothing is created. Asked before a working folder is uploaded."""
    with dependencies.creating():
        spec = await _read_spec(request, who)
        dependencies.need_trust(request, who, spec)
        run = await _find_runner(request)
        await run(submitting.check_only, db, spec, key=idempotency_key)
    return Response(status_code=204)


async def _read_spec(request: Request, who: Caller) -> JobSpec:
    """The spec of a request, for a project of the caller."""
    spec = parse_spec(await json_body.read_spec(request))
    if who.project is not None and spec.project == DEFAULT_PROJECT:  # not stated: the only one it may mean
        spec = replace(spec, project=who.project)
    need(who, Role.USER, project=spec.project)
    return spec


async def _find_runner(request: Request) -> Callable[..., Awaitable[Any]]:
    """Where a spec is checked: a large one waits for its turn."""
    large = len(await json_body.read_bytes(request)) > LARGE_BYTES
    return request.app.state.turns.run if large else run_in_threadpool


@router.get("/{uuid}", response_model=JobPage)
def find_job(job: dependencies.Job, live: dependencies.Live) -> Response:
    """The page of a job."""
    page = live.read(job.id)
    if page is None:
        raise not_found(job.id)
    return reply(page)


@router.post("/{uuid}/cancel", response_model=Job)
def cancel_job(job: dependencies.JobOrHead, db: dependencies.Db, who: dependencies.User) -> Response:
    """Request that a job saves and stops. 400 if it has ended."""
    return reply(shapes.job(dependencies.cancel(db, job, who)))


@router.put("/{uuid}/priority", response_model=Job)
def set_priority(
    request: Request, job: dependencies.Job, body: PriorityBody, db: dependencies.Db, who: dependencies.User
) -> Response:
    """Change the priority of a job that waits in our own queue; it keeps the time that it waited.

    409 where it has its machines or is over, and where its target queues.
    """
    return reply(shapes.job(change_priority(request, job, body, db, who)))


def change_priority(request: Request, job: JobRow, body: PriorityBody, db: Database, who: Caller) -> JobRow:
    """The job with its new priority. Whoever may submit such a job may change it."""
    with dependencies.creating():
        need(who, Role.USER, project=job.project)
        dependencies.need_trust(request, who, job.spec)
    try:
        changed = priority.change(db, job.id, body.priority, by=who.name)
    except JobMissing:
        raise not_found(job.id) from None
    except NotWaiting as error:
        raise Refused(409, "not_waiting", str(error)) from error
    request.app.state.kept.forget("queue")
    return changed


@router.delete("/{uuid}", status_code=204, response_class=Response)
def delete_job(
    request: Request, job: dependencies.JobOrHead, db: dependencies.Db, storage: dependencies.Storage,
    who: dependencies.User,
) -> Response:  # fmt: skip
    """Delete an ended job with its events, logs, files and checkpoints. 409 while it runs, or a later job needs it.

    The cost of a deleted job counts in no budget: where the project has one, only an admin of the server deletes what
    has cost.
    """
    need(who, Role.USER, project=job.project)
    if not who.runs_server and budget.counts(db, job):
        words = f"its cost counts in the budget of project {job.project}; an administrator of the server may delete it"
        raise Refused(403, "forbidden", words)
    try:
        maintain.delete_job(db, storage, request.app.state.home, job.id, by=who.name)
    except JobMissing:
        raise not_found(job.id) from None
    except JobOpen as error:
        raise Refused(409, "still_open", str(error)) from error
    return Response(status_code=204)


@router.post(
    "/{uuid}/resume",
    response_model=Created,
    status_code=201,
    responses={200: {"model": Created, "description": "Resumed before with this key"}},
)
def resume_job(
    request: Request, job: dependencies.Job, db: dependencies.Db, who: dependencies.User,
    idempotency_key: dependencies.Key = None,
) -> Response:  # fmt: skip
    """Continue an ended job as a new job, from its last checkpoint. 409 while it runs, 422 if it has saved none."""
    row, new = follow(request, job, db, who, submitting.resume, key=idempotency_key)
    return _created(row, new=new, note=budget.note_uncounted(db, row))


@router.post(
    "/{uuid}/rerun",
    response_model=Created,
    status_code=201,
    responses={200: {"model": Created, "description": "It was run again before, with this key"}},
)
def rerun_job(
    request: Request, job: dependencies.Job, db: dependencies.Db, who: dependencies.User,
    idempotency_key: dependencies.Key = None,
) -> Response:  # fmt: skip
    """A new job with the spec of this one, from the beginning."""
    row, new = follow(request, job, db, who, submitting.run_again, key=idempotency_key)
    return _created(row, new=new, note=budget.note_uncounted(db, row))


def follow(
    request: Request, job: JobRow, db: Database, who: Caller, submit: Callable[..., tuple[JobRow, bool]], *,
    key: str | None = None,
) -> tuple[JobRow, bool]:  # fmt: skip
    """What a submission made out of another job, and whether it is new."""
    with dependencies.creating():
        dependencies.need_trust(request, who, job.spec)
        return submit(db, job.id, key=key, by=who.name)


@router.get("/{uuid}/transitions", response_model=Transitions)
def list_transitions(job: dependencies.Job, db: dependencies.Db) -> Response:
    """Every change of the job's stage, in order, with its reason."""
    return reply(Transitions(transitions=tuple(jobs.list_transitions(db, job.id))))


@router.get("/{uuid}/deliveries", response_model=Deliveries, dependencies=[dependencies.admins])
def list_job_deliveries(
    job: dependencies.Job, db: dependencies.Db, failed: dependencies.Failed = False, limit: dependencies.Limit = 50
) -> Response:
    """Deliveries of the job's notifications to webhooks and channels, newest first."""
    return reply(deliveries.read(db, job=job.id, failed=failed, limit=limit))


@router.get("/{uuid}/attempts", response_model=Attempts)
def list_attempts(job: dependencies.Job, db: dependencies.Db) -> Response:
    """Every attempt of a job, and how it ended."""
    return reply(Attempts(attempts=tuple(shapes.attempt(row) for row in attempts.list_attempts(db, job.id))))


def _created(row: JobRow, *, new: bool, note: str | None) -> Response:
    headers = {"Location": f"{TRAINING}/jobs/{row.id}"}
    return reply(shapes.created(row, note=note), status_code=201 if new else 200, headers=headers)
