"""Objects of a job in storage. A row means that the object was stored whole and read back."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, bindparam, select

from trainmaster.store import tables as t
from trainmaster.store.columns import upsert
from trainmaster.store.database import Database
from trainmaster.store.rows import ArtifactRow


def insert_artifact(
    conn: Connection,
    *,
    job_id: str,
    attempt: str | None,
    kind: str,
    path: str,
    size_bytes: int,
    sha256: str,
    at: datetime,
) -> None:
    """Record an object stored under the job's prefix; storing it again replaces the row."""
    row = {"attempt": attempt, "kind": kind, "size_bytes": size_bytes, "sha256": sha256, "stored_at": at}
    change = upsert(conn.dialect.name, t.artifacts, ("job_id", "path"), tuple(row))
    conn.execute(change, {"job_id": job_id, "path": path, **row})


def list_artifacts(db: Database, job_id: str) -> list[ArtifactRow]:
    """What is kept of a job, by path."""
    return [ArtifactRow(**row) for row in db.mappings(_OF_JOB, {"job": job_id})]


_OF_JOB = select(t.artifacts).where(t.artifacts.c.job_id == bindparam("job")).order_by(t.artifacts.c.path)


def find_artifact(db: Database, job_id: str, path: str) -> ArtifactRow | None:
    query = select(t.artifacts).where(t.artifacts.c.job_id == job_id, t.artifacts.c.path == path)
    row = db.first(query)
    return ArtifactRow(**row) if row is not None else None
