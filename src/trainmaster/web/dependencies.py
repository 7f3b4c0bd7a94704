"""FastAPI dependencies of the routes: database, caller, job of a path, query parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Depends, Header, Path, Query, Request
from pydantic import AfterValidator, StringConstraints

from trainmaster.control import known_targets
from trainmaster.control import submit as submitting
from trainmaster.core.errors import (
    AccessRefused,
    Fault,
    JobFinal,
    JobMissing,
    JobOpen,
    JobUnreadable,
    KeyTaken,
    OverBudget,
    SpecError,
    TargetError,
    Unreachable,
    UsageError,
)
from trainmaster.core.ids import is_uuid
from trainmaster.core.roles import Role
from trainmaster.core.secret.shapes import recognise
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import Status
from trainmaster.pages.jobs import MOST
from trainmaster.storage import Store
from trainmaster.store import jobs
from trainmaster.store.capacity import sets
from trainmaster.store.database import Database
from trainmaster.store.heads import JobHead, find_head
from trainmaster.store.rows import JobRow
from trainmaster.web.auth import Caller, need
from trainmaster.web.curve_cache import CurveCache
from trainmaster.web.errors import Refused, not_found
from trainmaster.web.kept import Kept
from trainmaster.web.ledgers import Ledgers
from trainmaster.web.page_cache import PageCache

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"  # of a project, and of a token


def refuse_secret(text: str) -> str:
    """A name; ValueError where it looks like a secret. Names are stored, logged and shown."""
    if recognise(text) is not None:
        raise ValueError("looks like a secret, and names are stored and shown; choose another one")
    return text


Name = Annotated[str, StringConstraints(pattern=NAME), AfterValidator(refuse_secret)]
ProjectName = Annotated[str, Path(pattern=NAME, description="name of the project"), AfterValidator(refuse_secret)]


def _kept_as(name: str) -> Any:
    """What the application keeps under a name in its state."""

    # Async although it does not wait: FastAPI runs a plain function in a thread.
    async def read(request: Request) -> Any:
        return getattr(request.app.state, name)

    return Depends(read)


async def _viewer(request: Request) -> Caller:
    who: Caller | None = request.state.who
    if who is None:  # a public path that needs a caller: closed
        raise Refused(401, "no_token", "send a token: `Authorization: Bearer tm_…`")
    return who


async def _user(who: Viewer) -> Caller:
    need(who, Role.USER)
    return who


async def _admin(who: Viewer) -> Caller:
    need(who, Role.ADMIN)
    return who


async def _operator(who: Viewer) -> Caller:
    need(who, Role.ADMIN)
    return await _everywhere(who)


async def _everywhere(who: Viewer) -> Caller:
    if who.project is not None:
        raise Refused(
            403, "forbidden", f"token {who.name} is limited to one project; this endpoint covers all projects"
        )
    return who


Db = Annotated[Database, _kept_as("db")]
Live = Annotated[PageCache, _kept_as("live")]
LedgersKept = Annotated[Ledgers, _kept_as("ledgers")]
Curves = Annotated[CurveCache, _kept_as("curves")]
Answers = Annotated[Kept, _kept_as("kept")]
Storage = Annotated[Store, _kept_as("storage")]
Viewer = Annotated[Caller, Depends(_viewer)]
User = Annotated[Caller, Depends(_user)]
Admin = Annotated[Caller, Depends(_admin)]
Operator = Annotated[Caller, Depends(_operator)]  # admin of the whole server
admins = Depends(_admin)  # for a route that does not use the caller
everywhere = Depends(_everywhere)


def _job(
    uuid: Annotated[str, Path(description="id of the job", json_schema_extra={"format": "uuid"})], who: Viewer, db: Db
) -> JobRow:
    # Only a valid id reaches the database: PostgreSQL refuses a NUL, SQLite does not.
    try:
        job = jobs.find_job(db, uuid) if is_uuid(uuid) else None
    except JobUnreadable as error:
        if not who.sees(error.project):
            raise not_found(uuid[:64]) from None
        raise
    if job is None or not who.sees(job.project):  # a job of another project must look like none
        row = sets.find_set(db, uuid) if job is None and is_uuid(uuid) else None
        if row is not None and who.sees(row.project):
            message = (
                f"{uuid} is a set of runs, not a job; GET /v1/sets/{uuid} or `trainmaster show {row.name}` lists them"
            )
            raise Refused(404, "not_found", message)
        raise not_found(uuid[:64])
    return job


def _job_or_head(
    uuid: Annotated[str, Path(description="id of the job", json_schema_extra={"format": "uuid"})], who: Viewer, db: Db
) -> JobRow | JobHead:
    """Without its spec where that cannot be read; of another project it is unknown."""
    try:
        return _job(uuid, who, db)
    except JobUnreadable:
        if (head := find_head(db, uuid)) is None:
            raise not_found(uuid) from None
        return head


Job = Annotated[JobRow, Depends(_job)]
JobOrHead = Annotated[JobRow | JobHead, Depends(_job_or_head)]
StatusWord = Annotated[Status | None, Query(description="jobs with this status")]
# A person's name may have any character that is printed.
_Text = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{1,63}$"), AfterValidator(refuse_secret)]
Find = Annotated[
    _Text | None, Query(description="beginning of an id, or part of the name of a job or of who submitted it")
]
By = Annotated[_Text | None, Query(description="jobs that this token or person submitted: the whole name")]
Named = Annotated[_Text | None, Query(description="jobs with this name: the whole name")]
Failed = Annotated[bool, Query(description="only deliveries that failed or wait for a retry")]
Key = Annotated[
    str | None,
    Header(pattern=r"^[\x21-\x7e]{1,255}$", description="name of this submission: the same key returns what it made"),
]
Limit = Annotated[int, Query(ge=1, le=MOST, description="maximum number of results")]
Offset = Annotated[int, Query(ge=0, le=2**31, description="number of results to skip")]


async def _project(
    who: Viewer, project_id: Annotated[Name | None, Query(description="jobs of this project")] = None
) -> str | None:
    return scope(who, project_id)


Project = Annotated[str | None, Depends(_project)]


def scope(who: Caller, project: str | None) -> str | None:
    """The project of a request: the one in its query, or the only one of the caller."""
    if project is not None:
        need(who, Role.VIEWER, project=project)
    return project if project is not None else who.project


def need_all_of(who: Caller, project: str | None) -> None:
    """Refuse to make something with more rights than its creator has."""
    if project is None and who.project is not None:
        raise Refused(403, "forbidden", f"{who.label} is limited to the project {who.project}; name that project")
    need(who, Role.ADMIN, project=project)


@contextlib.contextmanager
def creating() -> Iterator[None]:
    """Turn the errors of a submission into answers."""
    try:
        yield
    except SpecError as error:
        raise Refused(422, "bad_spec", "the spec has faults; nothing was created", faults=error.faults) from error
    except KeyTaken as error:
        raise Refused(409, "key_taken", str(error)) from error
    except JobOpen as error:
        raise Refused(409, "still_open", str(error)) from error
    except AccessRefused as error:
        raise Refused(403, error.code, str(error)) from error
    except OverBudget as error:
        links = ((f"Cost of {error.project}", f"/cost?{urlencode({'project': error.project})}"),)
        raise Refused(402, "over_budget", str(error), links=links) from error
    except Unreachable:
        raise
    except (UsageError, TargetError) as error:
        fault = Fault(path="target", message=str(error).removeprefix("target: "))
        raise Refused(422, "bad_spec", "the target refuses the spec; nothing was created", faults=[fault]) from error


@contextlib.contextmanager
def finding() -> Iterator[None]:
    """Turn the error of a search that found nothing into an answer."""
    try:
        yield
    except UsageError as error:
        raise Refused(404, "not_found", str(error)) from error


def need_trust(request: Request, who: Caller, spec: JobSpec) -> None:
    """Refuse a target that the caller may not use: only an admin of the server acts with the server's own rights.

    Everybody else names what was granted to the project, and its jobs run there as the account of the project.
    """
    state = request.app.state
    if who.runs_server:
        known_targets.refuse_job_file(spec.target, state.home, state.storage.url)
    else:
        known_targets.admit(state.db, spec, trust_jobs=state.trust_jobs)
    known_targets.require_settings(state.db, spec)


def cancel(db: Database, job: JobRow | JobHead, who: Caller) -> JobRow | JobHead:
    """Request the cancellation of a job; Refused if it has ended."""
    try:
        return submitting.cancel(db, job.id, by=who.name)
    except JobMissing:
        raise not_found(job.id) from None
    except JobFinal as error:
        raise Refused(400, "already_final", str(error)) from error
