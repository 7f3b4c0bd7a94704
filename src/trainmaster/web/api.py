"""JSON for programs: the same dataclasses as the pages, submit, cancel, events, health."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from trainmaster import __version__, control
from trainmaster.core.errors import Fault, SpecError, UsageError
from trainmaster.core.spec import parse_spec
from trainmaster.pages import jobs as jobs_page
from trainmaster.pages import to_plain
from trainmaster.pages.job import plain_spec
from trainmaster.store import reads
from trainmaster.store.rows import EventRow, JobRow
from trainmaster.web import ask
from trainmaster.web.errors import Refused, not_found

router = APIRouter()


@router.get("/healthz")
def health(request: Request) -> Response:
    """Whether this server serves, and whether it drives the jobs."""
    reconciler: str = request.app.state.reconciler()
    fine = reconciler != "failed"
    body = {"status": "ok" if fine else "failing", "version": __version__, "reconciler": reconciler}
    return JSONResponse(body, status_code=200 if fine else 503)


@router.get("/api/hello")
def hello() -> dict[str, str]:
    return {"message": "Hello World", "version": __version__}


@router.get("/v1/training/jobs")
def list_jobs(
    db: ask.Db,
    status: ask.StatusWord = None,
    project_id: ask.ProjectName = None,
    limit: ask.Limit = 50,
    offset: ask.Offset = 0,
) -> Response:
    """Jobs, newest first."""
    return _json(jobs_page.read(db, status=status, project=project_id, limit=limit, offset=offset))


@router.get("/v1/training/jobs/{uuid}")
def find_job(job_id: ask.JobId, live: ask.Live) -> Response:
    """Everything the page of a job shows."""
    page = live.read(job_id)
    if page is None:
        raise not_found(job_id)
    return _json(page)


@router.post("/v1/training/jobs")
async def submit_job(request: Request, db: ask.Db) -> Response:
    """A spec as JSON becomes a queued job; every fault of it is named at once."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, "not_json", "send the spec as application/json")
    try:
        spec = parse_spec(_parse(await request.body()))
        row = await run_in_threadpool(control.submit, db, spec)
    except ClientDisconnect as gone:
        raise Refused(413, "too_large", "the body is too large, or was cut off") from gone
    except SpecError as wrong:
        raise Refused(422, "bad_spec", "the spec has faults; nothing was created", faults=wrong.faults) from wrong
    except UsageError as wrong:
        fault = Fault(path="target", message=str(wrong).removeprefix("target: "))
        raise Refused(422, "bad_spec", "the target refuses the spec; nothing was created", faults=[fault]) from wrong
    return _json(_job(row), status_code=201, headers={"Location": f"/v1/training/jobs/{row.id}"})


@router.post("/v1/training/jobs/{uuid}/cancel")
def cancel_job(job_id: ask.JobId, db: ask.Db) -> Response:
    """Ask a job to save and stop. 400 if it is over."""
    return _json(_job(ask.cancel(db, job_id)))


@router.get("/v1/training/jobs/{uuid}/events")
def list_events(
    job_id: ask.JobId,
    db: ask.Db,
    after: Annotated[str | None, Query(pattern=r"^\d{1,9}:\d{1,18}$", description="`next` of the last answer")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
) -> Response:
    """Events in their order, garbage lines too; `next` goes on behind them, and stays the same where none is new."""
    if reads.find_job(db, job_id) is None:
        raise not_found(job_id)
    number, _, offset = (after or "").partition(":")
    rows = reads.list_events(db, job_id, after=(int(number), int(offset)) if after else None, limit=limit)
    following = "{}:{}".format(*rows[-1].cursor) if rows else after
    return _json({"events": [_event(row) for row in rows], "next": following})


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as wrong:
        raise Refused(400, "not_json", f"the body is not JSON: {wrong}") from wrong


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON number")


def _job(row: JobRow) -> dict[str, Any]:
    return {**to_plain(row), "spec": plain_spec(row.spec)}


def _event(row: EventRow) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(row)
    return plain


def _json(value: object, *, status_code: int = 200, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(to_plain(value), status_code=status_code, headers=headers)
