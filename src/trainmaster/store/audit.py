"""The audit trail: who changed what, and when. Written with the change, and only ever added to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, insert, select

from trainmaster.api.access import AuditEntry
from trainmaster.store import tables as t
from trainmaster.store.database import Database


def record(conn: Connection, *, who: str, action: str, subject: str, detail: Mapping[str, Any] | None = None) -> None:
    """Note a change in the transaction that makes it. `detail` holds no secret."""
    row = {"at": datetime.now(UTC), "who": who, "action": action, "subject": subject, "detail": detail}
    conn.execute(insert(t.audit).values(row))


def list_audit(db: Database, *, subject: str | None = None, limit: int = 50, offset: int = 0) -> list[AuditEntry]:
    """Changes, newest first: all, or those of one subject (`job:<id>`, `token:<name>`, `budget:<project>/<period>`)."""
    query = select(t.audit).order_by(t.audit.c.id.desc()).limit(limit).offset(offset)
    if subject is not None:
        query = query.where(t.audit.c.subject == subject)
    return [AuditEntry(**row) for row in db.mappings(query)]


def find_canceller(db: Database, job_id: str) -> str | None:
    """The first who cancelled a job. None where nobody did, or its search had stopped it before."""
    query = select(t.audit.c.who, t.audit.c.action).where(
        t.audit.c.subject == f"job:{job_id}", t.audit.c.action.in_(("job.cancel", "job.prune"))
    )
    row = db.first(query.order_by(t.audit.c.id).limit(1))
    return row["who"] if row is not None and row["action"] == "job.cancel" else None


def find_set_canceller(db: Database, set_id: str) -> str | None:
    """The one who cancelled a set."""
    query = select(t.audit.c.who).where(t.audit.c.subject == f"set:{set_id}", t.audit.c.action == "set.cancel")
    who: str | None = db.scalar(query.order_by(t.audit.c.id.desc()).limit(1))
    return who


def list_origins(db: Database, job_ids: Sequence[str]) -> dict[str, str]:
    """By job: the one that it runs again. One query along the index of subjects."""
    subjects = {f"job:{job_id}": job_id for job_id in job_ids}
    query = select(t.audit.c.subject, t.audit.c.detail).where(
        t.audit.c.subject.in_(subjects), t.audit.c.action == "job.submit"
    )
    rows = db.rows(query) if subjects else ()
    known = {subjects[subject]: (detail or {}).get("again_of") for subject, detail in rows}
    return {job_id: origin for job_id, origin in known.items() if isinstance(origin, str)}
