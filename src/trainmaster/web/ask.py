"""What routes ask for: the database, the live pages, and the parts of an address, each checked once here."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Depends, Query, Request

from trainmaster import control
from trainmaster.core.errors import UsageError
from trainmaster.core.states import Status
from trainmaster.pages.jobs import MOST
from trainmaster.store import Database, reads
from trainmaster.store.rows import JobRow
from trainmaster.web.errors import Refused, not_found
from trainmaster.web.live import LivePages

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def _db(request: Request) -> Database:
    db: Database = request.app.state.db
    return db


def _live(request: Request) -> LivePages:
    live: LivePages = request.app.state.live
    return live


def _job_id(uuid: str) -> str:
    # Only what can be an id reaches the database; PostgreSQL would choke on a NUL where SQLite finds nothing.
    if not _UUID.fullmatch(uuid):
        raise not_found(uuid[:64])
    return uuid


Db = Annotated[Database, Depends(_db)]
Live = Annotated[LivePages, Depends(_live)]
JobId = Annotated[str, Depends(_job_id)]
StatusWord = Annotated[Status | None, Query(description="only this status")]
ProjectName = Annotated[
    str | None, Query(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$", description="only this project")
]
Limit = Annotated[int, Query(ge=1, le=MOST, description="at most so many")]
Offset = Annotated[int, Query(ge=0, le=2**31, description="leave out the first so many")]


def cancel(db: Database, job_id: str) -> JobRow:
    """Ask a job to stop, or say why it cannot be asked."""
    job = reads.find_job(db, job_id)
    if job is None:
        raise not_found(job_id)
    try:
        return control.cancel(db, job_id)
    except UsageError as wrong:
        raise Refused(400, "already_final", str(wrong)) from wrong
