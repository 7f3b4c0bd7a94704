"""What routes ask for: the database, who asks, the job of an address that they may see, and the parts of a query."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated

from fastapi import Depends, Path, Query, Request

from trainmaster import control
from trainmaster.core.errors import (
    Fault,
    JobFinal,
    JobMissing,
    JobOpen,
    KeyTaken,
    OverBudget,
    SpecError,
    TargetError,
    Unreachable,
    UsageError,
)
from trainmaster.core.ids import is_uuid
from trainmaster.core.roles import Role
from trainmaster.core.states import Status
from trainmaster.pages.jobs import MOST
from trainmaster.storage import Store
from trainmaster.store import Database, jobs
from trainmaster.store.rows import JobRow
from trainmaster.web.auth import Who, need
from trainmaster.web.errors import Refused, not_found
from trainmaster.web.page_cache import LivePages

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"  # of a project, and of a token


# Async although they wait for nothing: FastAPI sends what is not async to a thread, one by one.
async def _db(request: Request) -> Database:
    db: Database = request.app.state.db
    return db


async def _live(request: Request) -> LivePages:
    live: LivePages = request.app.state.live
    return live


async def _storage(request: Request) -> Store:
    store: Store = request.app.state.storage
    return store


async def _viewer(request: Request) -> Who:
    who: Who | None = request.state.who
    if who is None:  # a path that is open to all asks for somebody all the same: our own mistake, and closed
        raise Refused(401, "no_token", "send a token: `Authorization: Bearer tm_…`")
    return who


async def _user(who: Viewer) -> Who:
    need(who, Role.USER)
    return who


async def _admin(who: Viewer) -> Who:
    need(who, Role.ADMIN)
    return who


async def _everywhere(who: Viewer) -> Who:
    if who.project is not None:
        raise Refused(403, "forbidden", f"{who.name} has a part in one project only; this tells of all")
    return who


Db = Annotated[Database, Depends(_db)]
Live = Annotated[LivePages, Depends(_live)]
Storage = Annotated[Store, Depends(_storage)]
Viewer = Annotated[Who, Depends(_viewer)]
User = Annotated[Who, Depends(_user)]
Admin = Annotated[Who, Depends(_admin)]
admins = Depends(_admin)  # for a route that need not know who it is
everywhere = Depends(_everywhere)


def _job(
    uuid: Annotated[str, Path(description="the job's id", json_schema_extra={"format": "uuid"})], who: Viewer, db: Db
) -> JobRow:
    # Only what can be an id reaches the database; PostgreSQL would choke on a NUL where SQLite finds nothing.
    job = jobs.find_job(db, uuid) if is_uuid(uuid) else None
    if job is None or not who.sees(job.project):  # of what they may not see, people do not learn that it is there
        raise not_found(uuid[:64])
    return job


Job = Annotated[JobRow, Depends(_job)]
StatusWord = Annotated[Status | None, Query(description="only this status")]
Find = Annotated[
    str | None,
    Query(pattern=r"^[A-Za-z0-9.-]{1,63}$", description="only those whose id begins so, or whose name has this in it"),
]
Limit = Annotated[int, Query(ge=1, le=MOST, description="at most so many")]
Offset = Annotated[int, Query(ge=0, le=2**31, description="leave out the first so many")]


async def _project(
    who: Viewer, project_id: Annotated[str | None, Query(pattern=NAME, description="only this project")] = None
) -> str | None:
    return scope(who, project_id)


Project = Annotated[str | None, Depends(_project)]


def scope(who: Who, project: str | None) -> str | None:
    """The project to look in: the one that was asked for, or the only one they may see."""
    if project is not None:
        need(who, Role.VIEWER, project=project)
    return project if project is not None else who.project


@contextlib.contextmanager
def creating() -> Iterator[None]:
    """Around what makes a job: its refusals as answers."""
    try:
        yield
    except SpecError as wrong:
        raise Refused(422, "bad_spec", "the spec has faults; nothing was created", faults=wrong.faults) from wrong
    except KeyTaken as wrong:
        raise Refused(409, "key_taken", str(wrong)) from wrong
    except JobOpen as wrong:
        raise Refused(409, "still_open", str(wrong)) from wrong
    except OverBudget as wrong:
        raise Refused(402, "over_budget", str(wrong)) from wrong
    except Unreachable:
        raise
    except (UsageError, TargetError) as wrong:
        fault = Fault(path="target", message=str(wrong).removeprefix("target: "))
        raise Refused(422, "bad_spec", "the target refuses the spec; nothing was created", faults=[fault]) from wrong


def cancel(db: Database, job: JobRow, who: Who) -> JobRow:
    """Ask a job to stop, or say why it cannot be asked."""
    try:
        return control.cancel(db, job.id, by=who.name)
    except JobMissing:
        raise not_found(job.id) from None
    except JobFinal as wrong:
        raise Refused(400, "already_final", str(wrong)) from wrong
