"""Jobs that cost something in a window, a batch at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, and_, or_, select

from trainmaster.core.money.cost import Amount, Window, add_up
from trainmaster.core.states import Status
from trainmaster.store import costs
from trainmaster.store import tables as t
from trainmaster.store.database import Database

_JOBS, _ATTEMPTS = t.jobs.c, t.attempts.c
_BATCH = 500  # jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCostRow:
    """What one job has cost in the window."""

    id: str
    name: str
    project: str
    person: str | None
    target: str
    status: Status
    reason: str | None
    amount: Amount
    attempts: int
    gpu_hours: float


def scan_jobs(
    db: Database, *, project: str | None, window: Window | None, free: Collection[str], now: datetime
) -> Iterator[list[JobCostRow]]:
    """All of them, the oldest first. `free`: targets whose price of 0 is a default, as of `costs.sum_groups`."""
    held = [_ATTEMPTS.job_id == _JOBS.id]
    if window is not None:
        held += [_ATTEMPTS.created_at < window.end]
    wanted: list[ColumnElement[bool]] = [select(_ATTEMPTS.id).where(*held).exists()]
    wanted += [_JOBS.project == project] if project is not None else []
    columns = (
        _JOBS.id, _JOBS.created_at, _JOBS.name, _JOBS.project, _JOBS.submitted_by, _JOBS.target, _JOBS.status,
        _JOBS.reason, _JOBS.gpus, costs.NODES.label("nodes"), costs.EACH.label("each"),
        costs.is_unstated(free).label("unstated"),
    )  # fmt: skip
    query = select(*columns).order_by(_JOBS.created_at, _JOBS.id).limit(_BATCH)
    after: tuple[datetime, str] | None = None
    while True:
        found = query.where(*wanted)
        if after is not None:
            at, last = after
            found = found.where(or_(_JOBS.created_at > at, and_(_JOBS.created_at == at, _JOBS.id > last)))
        with db.read() as conn:
            jobs = conn.execute(found).all()
            ids = [job.id for job in jobs]
            charges: dict[str, list[costs.Charge]] = {job_id: [] for job_id in ids}
            for charge in costs.list_charges(conn, jobs=ids, window=window) if ids else ():
                if window is None or charge.touches(window, now=now):
                    charges[charge.job_id].append(charge)
        yield [_row(job, charges[job.id], window=window, now=now) for job in jobs if charges[job.id]]
        if len(jobs) < _BATCH:
            return
        after = (jobs[-1].created_at, jobs[-1].id)


def _row(job: Any, charges: Sequence[costs.Charge], *, window: Window | None, now: datetime) -> JobCostRow:
    amount, held_s = Amount(), 0.0
    for charge in charges:
        part = add_up(charge.spans, now=now, window=window)
        unknown = job.unstated and all(span.cents_per_hour == 0 for span in charge.spans)
        amount += Amount(unknown=1) if unknown else part
        # Of rented machines each has a span of its own.
        held_s += sum(span.seconds(now=now, window=window) for span in charge.spans) / len(charge.spans)
    gpus = job.gpus if job.gpus is not None else costs.count(job.nodes) * costs.count(job.each)
    return JobCostRow(
        id=job.id,
        name=job.name,
        project=job.project,
        person=job.submitted_by,
        target=job.target,
        status=Status(job.status),
        reason=job.reason,
        amount=amount,
        attempts=len(charges),
        gpu_hours=held_s / 3600 * gpus,
    )
