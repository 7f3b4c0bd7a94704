"""What jobs have cost, summed by the database: the most expensive ones by themselves, the rest by project."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import ColumnElement, Connection, and_, case, cast, func, literal, or_, select

from trainmaster.core.money.cost import Window
from trainmaster.store import costs
from trainmaster.store import tables as t

_JOBS, _ATTEMPTS = t.jobs.c, t.attempts.c


class JobSum(NamedTuple):
    """What one job has cost, or the jobs of one project together."""

    project: str
    known_cents: float
    unknown: int  # parts of a job without a price; of a project, jobs that have one
    jobs: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedSums:
    """What attempts that were given back and had no rented machines have cost in a window."""

    projects: dict[str, JobSum]  # all jobs of a project of which nothing else is to be counted
    dearest: dict[str, JobSum]  # by id, the most expensive of these; in the first window alone
    others: dict[str, JobSum]  # by id, of jobs that have more


def sum_jobs(
    conn: Connection, *, project: str | None = None, free: Collection[str], windows: Sequence[Window | None], most: int
) -> tuple[list[ClosedSums], set[str]]:
    """For each window (None: in all), sums of jobs; so many of the most expensive ones in the first by themselves.

    And the jobs that `list_charges(closed=False)` has more of. One statement: the rows of ten thousand jobs take longer
    to fetch than to add up.
    """
    unstated = costs.is_unstated(free)
    jobs, names = _job_sums(conn, project=project, windows=windows), [f"{place}" for place in range(len(windows))]
    found = {name: (jobs[f"known_{name}"], jobs[f"unknown_{name}"], jobs[f"parts_{name}"]) for name in names}
    # A price of 0 that nobody stated is unknown. Looked at only where nothing was paid: it takes the spec apart.
    nothing = select(case((unstated, 1), else_=0)).where(_JOBS.id == jobs.job_id).scalar_subquery()
    sums: list[ColumnElement[Any]] = []
    for known, unknown, parts in found.values():
        is_unknown = case((parts == 0, 0), (unknown > 0, 1), (known == 0, nothing), else_=0)
        sums += [func.sum(known), func.sum(is_unknown), func.sum(case((parts > 0, 1), else_=0))]
    own = [column for each in found.values() for column in each]
    first = found[names[0]]
    dearest = select(jobs.job_id, jobs.project, *own).where(jobs.going == 0, first[2] > 0)
    dearest = dearest.order_by(first[0].desc(), jobs.job_id).limit(most)
    query = sa.union_all(
        select(literal(0), cast("", sa.String), jobs.project, *sums).where(jobs.going == 0).group_by(jobs.project),
        select(literal(1), *dearest.subquery().c),
        select(literal(2), jobs.job_id, jobs.project, *own).where(jobs.going == 1),
    )
    listed, going = [ClosedSums(projects={}, dearest={}, others={}) for _ in windows], set()
    for kind, job_id, of, *values in conn.execute(query).all():
        if kind == 2:
            going.add(job_id)
        for place, each in enumerate(listed):
            known, unknown, count = values[3 * place : 3 * place + 3]
            if count and kind == 0:
                each.projects[of] = JobSum(of, known, unknown, count)
            elif count and (kind == 2 or place == 0):
                (each.others if kind == 2 else each.dearest)[job_id] = JobSum(of, known, unknown)
    return listed, going


def _job_sums(conn: Connection, *, project: str | None, windows: Sequence[Window | None]) -> Any:
    """Columns of a table with a row for each job: for each window known cents, unknown parts, and all parts.

    `going` is 1 where an attempt goes on or had rented machines; that one is in no sum.
    """
    spans = (
        select(
            _JOBS.id, _JOBS.project, case((or_(costs.END.is_(None), costs.is_rented()), 1), else_=0).label("going"),
            _ATTEMPTS.price_cents_per_hour.label("price"), costs.hours(conn, _ATTEMPTS.created_at).label("begun"),
            costs.hours(conn, costs.END).label("ended"),
        )
        .select_from(t.jobs.join(t.attempts, _ATTEMPTS.job_id == _JOBS.id))
        .where(*([_JOBS.project == project] if project is not None else []))
        .limit(costs.ALL)
        .subquery()
    ).c  # fmt: skip
    columns: list[ColumnElement[Any]] = []
    for place, window in enumerate(windows):
        inside, held_h = costs.share(spans, window)
        inside = and_(spans.going == 0, inside)
        columns += [
            func.coalesce(func.sum(case((inside, spans.price * held_h))), 0.0).label(f"known_{place}"),
            func.sum(case((and_(inside, spans.price.is_(None)), 1), else_=0)).label(f"unknown_{place}"),
            func.sum(case((inside, 1), else_=0)).label(f"parts_{place}"),
        ]
    going = func.max(spans.going).label("going")
    grouped = select(spans.id.label("job_id"), spans.project, going, *columns).group_by(spans.id, spans.project)
    return grouped.cte("job_sums").c
