"""The same submission sent twice makes one job: a key that the sender chose names it, within its project."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime

from sqlalchemy import Connection, func, or_, select, update

from trainmaster.core.errors import KeyTaken
from trainmaster.core.schema import to_plain
from trainmaster.core.spec import JobSpec
from trainmaster.store import tables as t
from trainmaster.store import writes

_JOBS = t.jobs.c


def insert_once(
    conn: Connection, job_id: str, spec: JobSpec, *, key: str | None, by: str | None, at: datetime
) -> tuple[str, bool]:
    """The id of the job that stands for this submission, and whether it was made now. KeyTaken on another spec."""
    name, content = (_digest(key), _digest(json.dumps(to_plain(spec), sort_keys=True))) if key else (None, None)
    if name is not None:
        _hold(conn, spec.project, name)
        earlier = select(_JOBS.id, _JOBS.submit_hash).where(_JOBS.project == spec.project, _JOBS.submit_key == name)
        row = conn.execute(earlier).first()
        if row is not None:
            if row.submit_hash != content:
                raise KeyTaken(f"this idempotency key stands for job {row.id}, which has another spec; take a new key")
            return row.id, False
    writes.insert_job(conn, job_id, spec, at=at)
    more = {"submit_key": name, "submit_hash": content, "submitted_by": by}
    conn.execute(update(t.jobs).where(_JOBS.id == job_id).values(more))
    return job_id, True


def find_writer(conn: Connection, first: str, *, besides: str) -> str | None:
    """The open job that writes the checkpoints of this one: itself, or one that goes on with them."""
    _hold(conn, "checkpoints", first)
    writes_them = or_(_JOBS.id == first, _JOBS.spec["resume_from"].as_string() == first)
    query = select(_JOBS.id).where(_JOBS.stage.is_not(None), _JOBS.id != besides, writes_them)
    return conn.execute(query.limit(1)).scalar_one_or_none()


def _hold(conn: Connection, project: str, name: str) -> None:
    """Let nobody else look for this key until we are done. SQLite has one writer at a time anyway."""
    if conn.dialect.name == "postgresql":
        conn.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(f"{project}/{name}", 0))))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
