"""Jobs of pages: many at once by their ids, and for comparisons without validating their specs, which takes longer."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, RowMapping, Text, func, or_, select, type_coerce

from trainmaster.api.compare import Choice
from trainmaster.api.jobs import JobName
from trainmaster.core.errors import JobUnreadable
from trainmaster.core.states import Status
from trainmaster.store import audit
from trainmaster.store import tables as t
from trainmaster.store.columns import Sound, slices
from trainmaster.store.database import Database
from trainmaster.store.jobs import COLUMNS, filter_jobs, read_job
from trainmaster.store.rows import JobRow, read_each

_NEAR = 1_000  # jobs of a project that are searched for the next one of a run: no index has it


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A job for a comparison, with its spec as it is stored."""

    id: str
    name: str
    project: str
    target: str
    submitted_by: str | None
    status: Status
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    spec: Mapping[str, Any]


def find_runs(conn: Connection, ids: Collection[str], *, project: str | None = None) -> dict[str, RunRow]:
    """The jobs of these ids that are there, of a project or of all."""
    j = t.jobs.c
    columns = (j.id, j.name, j.project, j.target, j.submitted_by, j.status, j.created_at, j.started_at, j.ended_at)
    found: dict[str, RunRow] = {}
    for some in slices(sorted(ids)):
        query = select(*columns, type_coerce(j.spec, Text).label("spec")).where(j.id.in_(some))
        query = query.where(j.project == project) if project is not None else query
        found |= {run.id: run for run in read_each(_run, conn.execute(query).mappings().all())}
    return found


def _run(row: RowMapping) -> RunRow:
    try:
        spec, status = _load(row["spec"]) if isinstance(row["spec"], str) else row["spec"], Status(row["status"])
    except (ValueError, RecursionError):
        spec = status = None
    if not isinstance(spec, Mapping) or status is None:
        raise JobUnreadable(row["id"], row["project"])
    return RunRow(**{**row, "status": status, "spec": spec})


@functools.lru_cache(maxsize=256)
def _load(text: str) -> Any:
    """Comparisons of the same runs are asked for again and again. Nobody may change it."""
    return json.loads(text)


class PriceRow(NamedTuple):
    """What is known of the price of a job an hour, and who submitted it."""

    submitted_by: str | None
    target: str
    stated: str | None  # dollars, in the spec
    cents_per_hour: float | None  # of its newest attempt


def list_prices(conn: Connection, ids: Collection[str]) -> dict[str, PriceRow]:
    """By job: the price of its newest attempt, and the one in its spec."""
    j, a = t.jobs.c, t.attempts.c
    stated = Sound(j.spec)["resources"]["price_per_hour"].as_string()
    query = select(j.id, j.submitted_by, j.target, stated, a.price_cents_per_hour)
    query = query.outerjoin(t.attempts, (a.job_id == j.id) & (a.number == j.attempts))
    found: dict[str, PriceRow] = {}
    for some in slices(sorted(ids)):
        found |= {row[0]: PriceRow(*row[1:]) for row in conn.execute(query.where(j.id.in_(some)))}
    return found


def list_choices(db: Database, *, project: str | None = None, word: str | None = None, limit: int) -> list[Choice]:
    """Jobs that can be chosen, newest first. A `word` is as for `list_jobs`."""
    j = t.jobs.c
    query = select(j.id, j.name, j.project, j.status, j.created_at).order_by(j.created_at.desc(), j.id.desc())
    query = filter_jobs(query, status=None, project=project, word=word).limit(limit)
    return read_each(_choice, db.mappings(query))


def _choice(row: RowMapping) -> Choice:
    try:
        return Choice(**{**row, "status": Status(row["status"])})
    except ValueError:
        raise JobUnreadable(row["id"], row["project"]) from None


def find_jobs(db: Database, ids: Sequence[str]) -> list[JobRow]:
    """Those of these jobs that are there, in the order of the ids."""
    found: dict[str, JobRow] = {}
    with db.read() as conn:
        for some in slices(ids):
            query = select(*COLUMNS).where(t.jobs.c.id.in_(some))
            found |= {job.id: job for job in read_each(read_job, conn.execute(query).mappings())}
    return [found[job_id] for job_id in ids if job_id in found]


def find_origin(db: Database, job_id: str, *, project: str) -> JobName | None:
    """The job that this one runs again, where it is there still."""
    first = audit.list_origins(db, [job_id]).get(job_id)
    j = t.jobs.c
    row = db.first(select(j.id, j.name).where(j.id == first, j.project == project)) if first else None
    return JobName(**row) if row is not None else None


def find_in_run(db: Database, job_id: str, *, later: bool) -> JobName | None:
    """The job after this one in its run (`trainmaster resume`), or the one before it.

    Searched are the `_NEAR` jobs of its project beside it, and of these the ones with its name. Of a job whose
    predecessor is not among them, the first job of the run.
    """
    j, first_of = t.jobs.c, Sound(t.jobs.c.spec)["resume_from"].as_string()
    with db.read() as conn:
        own = conn.execute(select(j.project, j.name, j.created_at, first_of).where(j.id == job_id)).first()
        if own is None or not (later or own[3]):
            return None
        project, name, at, first = *own[:3], own[3] or job_id
        beside, order = (j.created_at > at, j.created_at) if later else (j.created_at < at, j.created_at.desc())
        near = select(j.id, j.name).where(j.project == project, beside).order_by(order).limit(_NEAR)
        same = [row[0] for row in conn.execute(near) if row[1] == name]
        in_run = select(j.id).where(j.id.in_(same), or_(first_of == first, j.id == first))
        found: set[str] = set(conn.execute(in_run).scalars()) if same else set()
        nearest = next((other for other in same if other in found), None)
        if nearest is not None:
            return JobName(id=nearest, name=name)
        row = None if later else conn.execute(select(j.id, j.name).where(j.id == first)).first()
    return JobName(id=row[0], name=row[1]) if row is not None else None


def count_found(
    db: Database, *, project: str | None, word: str | None, by: str | None, name: str | None
) -> dict[Status, int]:
    """How many of the jobs that `filter_jobs` lets through each status has."""
    each = select(t.jobs.c.status, func.count()).group_by(t.jobs.c.status)
    rows = db.rows(filter_jobs(each, status=None, project=project, word=word, by=by, name=name))
    found: dict[str, int] = {row[0]: row[1] for row in rows}
    return {status: found.get(status.value, 0) for status in Status}
