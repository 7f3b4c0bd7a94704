"""Attempts that spend money now, with the caps of their jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from trainmaster.core.errors import JobUnreadable
from trainmaster.core.states import Stage
from trainmaster.store import tables as t
from trainmaster.store.columns import Sound
from trainmaster.store.rows import log_once

_MOST_CAP = 1e9  # dollars, as core/spec.py bounds it: when a larger one is reached is no date
_JOBS, _ATTEMPTS = t.jobs.c, t.attempts.c


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """A running attempt and the cost cap of its job."""

    job_id: str
    name: str
    project: str
    status: str
    attempt: str
    max_cost: float | None  # dollars
    resume_from: str | None  # the first job of its run
    begun: bool  # its target has answered: a price that is not known now stays unknown
    stopping: bool  # it was asked to stop, for whatever reason


def list_spending(conn: Connection, *, capped: bool = False) -> list[Spending]:
    """Every attempt that goes on or is not released yet; `capped`: only of jobs with a cap of their own."""
    # As text: a cap that is no number would end the query, and with it the watch over all others.
    cap = Sound(_JOBS.spec)["limits"]["max_cost"].as_string()
    first = Sound(_JOBS.spec)["resume_from"].as_string()
    query = (
        select(_JOBS.id, _JOBS.name, _JOBS.project, _JOBS.status, _JOBS.stage, _JOBS.cancel_requested,
               _ATTEMPTS.id.label("attempt"), _ATTEMPTS.stop_reason, cap.label("cap"), first.label("first"))
        .join(t.attempts, (_ATTEMPTS.job_id == _JOBS.id) & (_ATTEMPTS.number == _JOBS.attempts))
        .where(_JOBS.stage.is_not(None), _ATTEMPTS.released_at.is_(None))
    )  # fmt: skip
    query = query.where(cap.is_not(None)) if capped else query
    return [
        Spending(
            job_id=row.id,
            name=row.name,
            project=row.project,
            status=row.status,
            attempt=row.attempt,
            max_cost=_read_cap(row),
            resume_from=row.first,
            begun=row.stage in (Stage.CHECKING, Stage.RUNNING),
            stopping=row.cancel_requested or row.stop_reason is not None,
        )
        for row in conn.execute(query)
    ]


def _read_cap(row: Any) -> float | None:
    """Dollars; None where there is no cap, or where it is no amount: its project's budget holds all the same."""
    if row.cap is None:
        return None
    try:
        cap = float(row.cap)
    except ValueError:
        cap = 0.0
    if 0.0 < cap <= _MOST_CAP:
        return cap
    log_once(JobUnreadable(row.id, row.project))
    return None
