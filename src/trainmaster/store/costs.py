"""Costs of attempts and rented machines, and budgets of projects.

An attempt costs from when it was placed until everything it held was given back. Where machines were rented for it,
they are what costs: each from its launch until the cloud said that it is gone, which may be later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Float, and_, case, cast, delete, func, literal, or_, select, update

from trainmaster.core.money.cost import Amount, Span, Window, add_up, month_of
from trainmaster.core.states import Stage
from trainmaster.store import tables as t
from trainmaster.store.columns import UtcTime, upsert
from trainmaster.store.database import Database

PERIODS = ("total", "month")
_AT_ONCE = 500  # ids in one query
_JOBS, _ATTEMPTS, _INSTANCES = t.jobs.c, t.attempts.c, t.instances.c
_FIRST = _JOBS.spec["resume_from"].as_string()
# When an attempt was given back. A final job holds nothing, even where no release time was written.
_END = case(
    (_ATTEMPTS.released_at.is_not(None), _ATTEMPTS.released_at),
    (_JOBS.stage.is_(None), func.coalesce(_ATTEMPTS.ended_at, _JOBS.ended_at)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """Charge for one attempt, in one or more spans of time."""

    job_id: str
    project: str
    attempt: str
    spans: tuple[Span, ...]

    @property
    def is_open(self) -> bool:
        return any(span.end is None for span in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRow:
    """Budget of a project: total, or per calendar month (UTC)."""

    id: int
    project: str
    period: str
    cap_cents: int
    created_at: datetime
    warned_at: datetime | None

    def window(self, now: datetime) -> Window | None:
        return month_of(now) if self.period == "month" else None

    def label(self, now: datetime) -> str:
        """Which of its periods the time is in: `total`, or the month as 2026-11."""
        return f"{now:%Y-%m}" if self.period == "month" else "total"


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


def list_charges(
    conn: Connection,
    *,
    jobs: Collection[str] = (),
    project: str | None = None,
    window: Window | None = None,
    closed: bool = True,
) -> list[Charge]:
    """Charges of these jobs, or of a project, or of all; only those with a part in the window, where one is given.

    Not `closed`: only those that go on, or for which machines were rented; `sum_closed` has the others.
    """
    wanted: list[ColumnElement[bool]] = []
    if project is not None:
        wanted.append(_JOBS.project == project)
    if window is not None:
        # One that is not given back may go on; whether it does is seen below.
        wanted += [_ATTEMPTS.created_at < window.end, _is_since(window.start)]
    if not closed:
        wanted.append(_END.is_(None) | _rented())
    if not jobs:
        return _charges(conn, wanted)
    ids, charges = sorted(jobs), []
    for first in range(0, len(ids), _AT_ONCE):
        charges += _charges(conn, [*wanted, _JOBS.id.in_(ids[first : first + _AT_ONCE])])
    return charges


def spent(conn: Connection, project: str, *, now: datetime, window: Window | None = None) -> Amount:
    """What a project has spent, in all or in a window."""
    return spent_by_project(conn, project=project, now=now, window=window).get(project, Amount())


def spent_by_project(
    conn: Connection, *, project: str | None = None, now: datetime, window: Window | None = None
) -> dict[str, Amount]:
    """What each project has spent, or this one; those that were never charged for are not named."""
    spent = sum_closed(conn, project=project, window=window)
    for charge in list_charges(conn, project=project, window=window, closed=False):
        spent[charge.project] = spent.get(charge.project, Amount()) + add_up(charge.spans, now=now, window=window)
    return spent


def list_unpriced(conn: Connection, *, free: Collection[str], project: str | None = None) -> set[str]:
    """Jobs on these targets that state no price: theirs is 0 by default, which no cap counts."""
    stated = _JOBS.spec["resources"]["price_per_hour"].as_string()
    words = [_JOBS.target.startswith(f"{name}:", autoescape=True) for name in free]
    # With an account before it. What stands behind a colon is an option and no name.
    words += [and_(_JOBS.target.like(f"%@{name}"), _JOBS.target.not_like("%:%")) for name in free]
    query = select(_JOBS.id).where(or_(_JOBS.target.in_(free), *words), stated.is_(None))
    return set(conn.execute(query.where(_JOBS.project == project) if project is not None else query).scalars())


def sum_closed(conn: Connection, *, project: str | None = None, window: Window | None = None) -> dict[str, Amount]:
    """By project: what was spent on attempts that were given back and had no rented machines.

    Summed by the database: of a service that is not new they are nearly all attempts, and none of them changes any
    more. The rest is what `list_charges(closed=False)` gives.
    """
    start: ColumnElement[Any] = _ATTEMPTS.created_at
    end: ColumnElement[Any] = _END
    wanted = [_END.is_not(None), ~_rented()]
    wanted += [_JOBS.project == project] if project is not None else []
    if window is not None:
        first, last = (literal(when, UtcTime()) for when in (window.start, window.end))
        wanted += [start < last, end > first]
        start, end = case((start < first, first), else_=start), case((end > last, last), else_=end)
    hours = _hours(conn, start, end)
    unknown = func.sum(case((_ATTEMPTS.price_cents_per_hour.is_(None), 1), else_=0))
    query = (
        select(_JOBS.project, func.sum(_ATTEMPTS.price_cents_per_hour * hours), unknown)
        .join(t.attempts, _ATTEMPTS.job_id == _JOBS.id)
        .where(*wanted)
        .group_by(_JOBS.project)
    )
    return {
        name: Amount(known_cents=float(known or 0.0), unknown=int(parts)) for name, known, parts in conn.execute(query)
    }


def job_costs(db: Database, jobs: Collection[str], *, now: datetime, window: Window | None = None) -> dict[str, Amount]:
    """The cost of each of these jobs; one that was never placed has cost nothing."""
    amounts = dict.fromkeys(jobs, Amount())
    if not jobs:
        return {}
    with db.read() as conn:
        for charge in list_charges(conn, jobs=jobs, window=window):
            amounts[charge.job_id] += add_up(charge.spans, now=now, window=window)
    return amounts


def list_spending(conn: Connection, *, capped: bool = False) -> list[Spending]:
    """Every attempt that goes on or is not released yet; `capped`: only of jobs with a cap of their own."""
    cap = _JOBS.spec["limits"]["max_cost"].as_float()
    query = (
        select(_JOBS.id, _JOBS.name, _JOBS.project, _JOBS.status, _JOBS.stage, _JOBS.cancel_requested,
               _ATTEMPTS.id.label("attempt"), _ATTEMPTS.stop_reason, cap.label("cap"), _FIRST.label("first"))
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
            max_cost=row.cap,
            resume_from=row.first,
            begun=row.stage in (Stage.CHECKING, Stage.RUNNING),
            stopping=row.cancel_requested or row.stop_reason is not None,
        )
        for row in conn.execute(query)
    ]


def list_run(conn: Connection, first: str | None) -> list[str]:
    """The jobs of a run by the id of its first one; none for a job that resumes no other."""
    if first is None:
        return []
    return list(conn.execute(select(_JOBS.id).where(or_(_JOBS.id == first, first == _FIRST))).scalars())


def set_price(conn: Connection, attempt: str, cents_per_hour: float | None) -> None:
    """The price of an attempt, where it is known; one that is not takes nothing back."""
    if cents_per_hour is not None:
        row = update(t.attempts).where(_ATTEMPTS.id == attempt)
        conn.execute(row.values(price_cents_per_hour=cents_per_hour))


def set_budget(conn: Connection, project: str, period: str, cap_cents: int, *, at: datetime) -> None:
    """What a project may spend; a cap that was there is replaced, and its warning forgotten."""
    assert period in PERIODS and cap_cents >= 0, f"no budget: {cap_cents} a {period}"
    row = {"cap_cents": cap_cents, "created_at": at, "warned_at": None}
    change = upsert(conn.dialect.name, t.budgets, ("project", "period"), tuple(row))
    conn.execute(change, {"project": project, "period": period, **row})


def remove_budget(conn: Connection, project: str, period: str) -> bool:
    """Let a project spend what it likes; False if it did already."""
    gone = delete(t.budgets).where(t.budgets.c.project == project, t.budgets.c.period == period)
    return conn.execute(gone).rowcount == 1


def mark_warned(conn: Connection, budget_id: int, *, at: datetime) -> None:
    conn.execute(update(t.budgets).where(t.budgets.c.id == budget_id).values(warned_at=at))


def list_budgets(conn: Connection, *, project: str | None = None) -> list[BudgetRow]:
    """Budgets by project and period."""
    query = select(t.budgets).order_by(t.budgets.c.project, t.budgets.c.period)
    if project is not None:
        query = query.where(t.budgets.c.project == project)
    return [BudgetRow(**row) for row in conn.execute(query).mappings()]


def _is_since(start: datetime) -> ColumnElement[bool]:
    # An attempt that was given back may have a machine that is not gone: its own times say. Under a name of its own,
    # because the query around it may read the machines too.
    machine = t.instances.alias("late").c
    late = select(machine.id).where(
        machine.attempt == _ATTEMPTS.id, machine.gone_at.is_(None) | (machine.gone_at > start)
    )
    return _ATTEMPTS.released_at.is_(None) | (_ATTEMPTS.released_at > start) | late.exists()


def _rented() -> ColumnElement[bool]:
    machine = t.instances.alias("rented").c
    return select(machine.id).where(machine.attempt == _ATTEMPTS.id).exists()


def _hours(conn: Connection, start: ColumnElement[Any], end: ColumnElement[Any]) -> ColumnElement[Any]:
    if conn.dialect.name == "sqlite":
        return (func.julianday(end, type_=Float) - func.julianday(start, type_=Float)) * 24.0
    return cast(func.extract("epoch", end - start), Float) / 3600.0


# Few columns and no order: over a year of jobs each of them is a hundred thousand values.
_CHARGES = select(
    _ATTEMPTS.id, _ATTEMPTS.price_cents_per_hour, _ATTEMPTS.created_at, _END.label("end"), _JOBS.id.label("job_id"),
    _JOBS.project,
).join(t.jobs, _JOBS.id == _ATTEMPTS.job_id)  # fmt: skip
_ANY_MACHINE = select(_INSTANCES.id).limit(1)


def _charges(conn: Connection, wanted: Sequence[ColumnElement[bool]]) -> list[Charge]:
    query = _CHARGES.where(*wanted)
    rented = _machines(conn, wanted) if conn.execute(_ANY_MACHINE).first() is not None else {}
    return [
        Charge(job_id=job_id, project=project, attempt=attempt,
               spans=_spans(Span(cents_per_hour=price, start=start, end=end), rented.get(attempt, ())))
        for attempt, price, start, end, job_id, project in conn.execute(query)
    ]  # fmt: skip


def _machines(conn: Connection, wanted: Sequence[ColumnElement[bool]]) -> dict[str, list[Any]]:
    query = (
        select(_INSTANCES.attempt, _INSTANCES.state, _INSTANCES.price_cents_per_hour, _INSTANCES.created_at,
               _INSTANCES.launched_at, _INSTANCES.gone_at)
        .join(t.attempts, _ATTEMPTS.id == _INSTANCES.attempt)
        .join(t.jobs, _JOBS.id == _ATTEMPTS.job_id)
        .where(*wanted)
    )  # fmt: skip
    rented: dict[str, list[Any]] = {}
    for machine in conn.execute(query):
        rented.setdefault(machine.attempt, []).append(machine)
    return rented


def _spans(own: Span, machines: Iterable[Any]) -> tuple[Span, ...]:
    # An intended machine was not asked for yet. From the asking on it may exist, and may have to be paid.
    spans = tuple(
        Span(cents_per_hour=machine.price_cents_per_hour, start=machine.launched_at or machine.created_at,
             end=machine.gone_at)
        for machine in machines if machine.state != "intended"
    )  # fmt: skip
    if not spans:
        return (own,)
    if own.cents_per_hour is not None and any(span.cents_per_hour is None for span in spans):
        # The whole is known where a part is not: the attempt's price, for as long as any of its machines is there.
        ends = [own.end, *(span.end for span in spans)]
        last = None if None in ends else max(end for end in ends if end is not None)
        return (Span(cents_per_hour=own.cents_per_hour, start=own.start, end=last),)
    return spans
