"""Chunks (`blobs`) and snapshots of working folders, by project."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, delete, func, select, update

from trainmaster.core.workdir import PREFIX
from trainmaster.store import tables as t
from trainmaster.store.columns import Shapeless, Sound, slices, upsert
from trainmaster.store.database import Database

_B, _W = t.blobs.c, t.workdirs.c


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRow:
    """A chunk in storage."""

    sha256: str
    size_bytes: int
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkdirRow:
    """A snapshot whose chunks are all in storage."""

    project: str
    sha256: str
    manifest: tuple[str, ...]
    files: int
    size_bytes: int


def find_blobs(db: Database, project: str, digests: Collection[str]) -> dict[str, BlobRow]:
    """The chunks of a project among these, by their SHA-256."""
    blobs = {}
    with db.read() as conn:
        for some in slices(digests):
            query = select(_B.sha256, _B.size_bytes, _B.place).where(_B.project == project, _B.sha256.in_(some))
            blobs.update({row["sha256"]: BlobRow(**row) for row in conn.execute(query).mappings()})
    return blobs


def touch_blobs(conn: Connection, project: str, digests: Collection[str], *, at: datetime) -> int:
    """Note that an upload needs these chunks now: a sweep leaves them. The number of those that are there."""
    count = 0
    for some in slices(sorted(digests)):  # two uploads at once lock rows in the same order
        change = update(t.blobs).where(_B.project == project, _B.sha256.in_(some)).values(used_at=at)
        count += conn.execute(change).rowcount
    return count


def insert_blob(conn: Connection, project: str, blob: BlobRow, *, at: datetime) -> bool:
    """Record a chunk; False where another upload of it was first."""
    change = upsert(conn.dialect.name, t.blobs, ("project", "sha256"))
    row = {"sha256": blob.sha256, "size_bytes": blob.size_bytes, "place": blob.place}
    return bool(conn.execute(change, {"project": project, **row, "used_at": at}).rowcount)


def sum_bytes(db: Database, project: str) -> int:
    """Bytes of all chunks of a project."""
    return int(db.scalar(select(func.coalesce(func.sum(_B.size_bytes), 0)).where(_B.project == project)))


def put_workdir(conn: Connection, row: WorkdirRow, *, at: datetime) -> None:
    """Record a snapshot, or note that it is used again."""
    change = upsert(conn.dialect.name, t.workdirs, ("project", "sha256"), ("used_at",))
    facts = {"manifest": list(row.manifest), "files": row.files, "size_bytes": row.size_bytes}
    conn.execute(change, {"project": row.project, "sha256": row.sha256, **facts, "used_at": at})


def find_workdir(db: Database, project: str, sha256: str) -> WorkdirRow | None:
    row = db.first(select(t.workdirs).where(_W.project == project, _W.sha256 == sha256))
    return _row(dict(row)) if row is not None else None


def list_workdirs(db: Database) -> list[WorkdirRow]:
    """Every snapshot."""
    return [_row(dict(row)) for row in db.mappings(select(t.workdirs))]


def delete_unused(conn: Connection, *, before: datetime) -> int:
    """Delete the snapshots that no job and no set names and no upload has touched since `before`; their number."""
    word, of_set = PREFIX + _W.sha256, t.job_sets.c
    used = Sound(t.jobs.c.spec)["workdir"].as_string() == word
    # Nobody can say which one an open job needs whose spec is no mapping.
    used |= t.jobs.c.stage.is_not(None) & Shapeless(t.jobs.c.spec)
    named = select(t.jobs.c.id).where(t.jobs.c.project == _W.project, used)
    # What a set will begin later: trials that wait, the next trials of a search, the next time of a schedule.
    begins = select(of_set.id).where(of_set.project == _W.project, of_set.cancel_at.is_(None))
    waiting, search, schedule = t.set_trials.c, t.searches.c, t.schedules.c
    trial = (waiting.set_id == of_set.id, waiting.job_id.is_(None), waiting.spec["workdir"].as_string() == word)
    proposed = (search.set_id == of_set.id, of_set.over.is_(False), search.template["workdir"].as_string() == word)
    scheduled = (schedule.set_id == of_set.id, schedule.workdir == word)
    unused = [~query.exists() for query in (named, *(begins.where(*each) for each in (trial, proposed, scheduled)))]
    return conn.execute(delete(t.workdirs).where(_W.used_at < before, *unused)).rowcount


def list_old_blobs(db: Database, *, before: datetime) -> list[tuple[str, BlobRow]]:
    """Chunks that no upload has touched since `before`, with their project."""
    query = select(_B.project, _B.sha256, _B.size_bytes, _B.place).where(_B.used_at < before)
    rows = db.mappings(query)
    return [
        (row["project"], BlobRow(sha256=row["sha256"], size_bytes=row["size_bytes"], place=row["place"]))
        for row in rows
    ]


def delete_blob(conn: Connection, project: str, sha256: str, *, before: datetime) -> bool:
    """Delete the row of a chunk; False where an upload has touched it meanwhile."""
    this = (_B.project == project, _B.sha256 == sha256, _B.used_at < before)
    return bool(conn.execute(delete(t.blobs).where(*this)).rowcount)


def _row(row: dict[str, object]) -> WorkdirRow:
    row.pop("used_at")
    return WorkdirRow(**{**row, "manifest": tuple(row["manifest"])})  # type: ignore[arg-type]
