"""Costs of attempts and rented machines, and budgets of projects.

An attempt costs from when it was placed until everything it held was given back. Where machines were rented for it,
they are what costs: each from its launch until the cloud said that it is gone, which may be later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Float, and_, case, cast, delete, func, or_, select, true, update

from trainmaster.core.money.cost import Amount, Span, Window, add_up, month_of
from trainmaster.core.states import Reason
from trainmaster.store import tables as t
from trainmaster.store.columns import Sound, slices, upsert
from trainmaster.store.database import Database

PERIODS = ("total", "month")
ALL = 2**62  # a LIMIT that cuts nothing off: without one SQLite works the times out again for each window
_LIMITS = (Reason.OVER_BUDGET.value, Reason.TIMED_OUT.value)  # a job that they ended did not fail by itself
_INSTANT_H = 1e-6  # 4 ms: less is rounding of a time as a number
_JOBS, _ATTEMPTS, _INSTANCES = t.jobs.c, t.attempts.c, t.instances.c
_FIRST_TIME = datetime(1970, 1, 2, tzinfo=UTC)
_FIRST = Sound(_JOBS.spec)["resume_from"].as_string()
_STATED = Sound(_JOBS.spec)["resources"]["price_per_hour"].as_string()
# As text: a number that is none would end the query. Of jobs without `gpus` alone: it takes the spec apart.
NODES = case((_JOBS.gpus.is_(None), Sound(_JOBS.spec)["resources"]["nodes"].as_string()))
EACH = case((_JOBS.gpus.is_(None), Sound(_JOBS.spec)["resources"]["processes_per_node"].as_string()))
# When an attempt was given back. A final job holds nothing, even where no release time was written.
END = case(
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

    def touches(self, window: Window, *, now: datetime) -> bool:
        """Whether any part of it lies in a window."""
        return any(span.seconds(now=now, window=window) > 0 for span in self.spans)


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
        wanted.append(END.is_(None) | is_rented())
    if not jobs:
        return _charges(conn, wanted)
    ids, charges = sorted(jobs), []
    for some in slices(ids):
        charges += _charges(conn, [*wanted, _JOBS.id.in_(some)])
    return charges


def spent(conn: Connection, project: str, *, now: datetime, window: Window | None = None) -> Amount:
    """What a project has spent, in all or in a window."""
    return spent_by_project(conn, project=project, now=now, windows=[window])[0].get(project, Amount())


def spent_by_project(
    conn: Connection, *, project: str | None = None, now: datetime, windows: Sequence[Window | None]
) -> list[dict[str, Amount]]:
    """For each window (None: in all), what each project has spent, or this one; without those never charged for."""
    charges = list_charges(conn, project=project, closed=False)
    sums: list[dict[str, Amount]] = []
    closed = _sum_closed(conn, (_JOBS.project,), project=project, windows=windows)
    for window, rows in zip(windows, closed, strict=True):
        spent = {row[0]: Amount(known_cents=row[1], unknown=row[2]) for row in rows}
        for charge in charges:
            if window is None or charge.touches(window, now=now):
                spent[charge.project] = spent.get(charge.project, Amount()) + add_up(
                    charge.spans, now=now, window=window
                )
        sums.append(spent)
    return sums


def list_unpriced(
    conn: Connection, *, free: Collection[str], project: str | None = None, jobs: Collection[str] = ()
) -> set[str]:
    """Jobs on these targets that state no price: theirs is 0 by default, which no cap counts. Of these jobs, or all."""
    wanted = [_JOBS.project == project] if project is not None else []
    wanted += [_JOBS.id.in_(sorted(jobs))] if jobs else []
    return set(conn.execute(select(_JOBS.id).where(*wanted, is_unstated(free))).scalars())


def is_unstated(free: Collection[str]) -> ColumnElement[bool]:
    """Whether a job is on one of these targets and states no price."""
    return and_(_on(free), _STATED.is_(None))


def _on(targets: Collection[str]) -> ColumnElement[bool]:
    """Whether a job is on one of these targets."""
    words = [_JOBS.target.startswith(f"{name}:", autoescape=True) for name in targets]
    # With an account before it. What stands behind a colon is an option and no name.
    words += [and_(_JOBS.target.like(f"%@{name}"), _JOBS.target.not_like("%:%")) for name in targets]
    return or_(_JOBS.target.in_(targets), *words)


def sum_closed(conn: Connection, *, project: str | None = None, window: Window | None = None) -> dict[str, Amount]:
    """By project: what was spent on attempts that were given back and had no rented machines.

    Summed by the database: of a service that is not new they are nearly all attempts, and none of them changes any
    more. The rest is what `list_charges(closed=False)` gives.
    """
    rows = _sum_closed(conn, (_JOBS.project,), project=project, windows=[window])[0]
    return {name: Amount(known_cents=known, unknown=unknown) for name, known, unknown, *_ in rows}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSum:
    """What the jobs of one project, person, target and status have cost; those that a limit ended by themselves."""

    project: str
    person: str | None  # name of the token; None: the command line on the home folder
    target: str
    status: str
    limited: bool  # a budget or a time limit ended it
    amount: Amount
    attempts: int
    gpu_hours: float  # of what they held: nodes × processes_per_node, from when they were placed until given back


def sum_groups(
    conn: Connection, going: Sequence[Charge], *, project: str | None = None, free: Collection[str] = (),
    now: datetime, windows: Sequence[Window | None], recall: Callable[[Hashable, Callable[[], Any]], Any],
) -> list[list[GroupSum]]:  # fmt: skip
    """For each window (None: in all), costs by project, person, target and status.

    `going` is what `list_charges(closed=False)` gave; the rest is summed by the database, in one pass for all windows,
    where `recall` (kept_sums.py) has no sums of what this transaction sees.
    `free`: targets whose price of 0 is a default: an attempt there has an unknown price unless somebody stated one.
    """
    unstated = is_unstated(free)
    # Looked at only where a price is 0: it takes the spec apart.
    price = case((_ATTEMPTS.price_cents_per_hour == 0, unstated))
    limited = case((_JOBS.reason.in_(_LIMITS), 1), else_=0)
    owner = (_JOBS.project, _JOBS.submitted_by, _JOBS.target, _JOBS.status, limited)
    held = (_JOBS.gpus, NODES, EACH)
    keys = (*owner, *held, price)
    owners: dict[str, tuple[Any, ...]] = {}
    ids = sorted({charge.job_id for charge in going})
    for some in slices(ids):
        query = select(_JOBS.id, *owner, *held, unstated).where(_JOBS.id.in_(some))
        owners |= {row[0]: tuple(row[1:]) for row in conn.execute(query)}
    # Nothing after `now`: the page of a project must not be of a later moment than that of all.
    is_past = recall("newest", lambda: _find_newest_end(conn)) <= now.timestamp() / 3600
    until = windows if is_past else [_until(window, now) for window in windows]
    kept_as = ("groups", project, tuple(free), *until)
    closed = recall(kept_as, lambda: _sum_closed(conn, keys, project=project, windows=until))
    groups = []
    for window, rows in zip(windows, closed, strict=True):
        sums: dict[tuple[Any, ...], tuple[Amount, int, float]] = {}

        for *key, nobody_stated, known, unknown, attempts, hours in rows:
            part = Amount(known_cents=known, unknown=attempts if nobody_stated else unknown)
            _add(sums, key, part, attempts=attempts, hours=hours)
        for charge in going:
            if window is None or charge.touches(window, now=now):
                *key, nobody_stated = owners[charge.job_id]
                part = add_up(charge.spans, now=now, window=window)
                if nobody_stated and all(span.cents_per_hour == 0 for span in charge.spans):
                    part = Amount(unknown=1)
                # Of rented machines each has a span of its own.
                seconds = [span.seconds(now=now, window=window) for span in charge.spans]
                _add(sums, key, part, attempts=1, hours=sum(seconds) / len(seconds) / 3600)
        groups.append(
            [
                GroupSum(
                    project=of,
                    person=person,
                    target=target,
                    status=status,
                    limited=bool(by_limit),
                    amount=amount,
                    attempts=attempts,
                    gpu_hours=gpu_hours,
                )
                for (of, person, target, status, by_limit), (amount, attempts, gpu_hours) in sums.items()
            ]
        )
    return groups


def _find_newest_end(conn: Connection) -> float:
    """When the last attempt that was given back was, in hours since 1970."""
    ends = select(func.max(hours(conn, END))).select_from(t.jobs.join(t.attempts, _ATTEMPTS.job_id == _JOBS.id))
    return conn.execute(ends).scalar() or 0.0


def _until(window: Window | None, now: datetime) -> Window:
    start, end = (window.start, window.end) if window is not None else (_FIRST_TIME, now)
    return Window(start=min(start, now), end=min(end, now))


def _add(
    sums: dict[tuple[Any, ...], tuple[Amount, int, float]], key: Sequence[Any], part: Amount, *, attempts: int,
    hours: float,
) -> None:  # fmt: skip
    *whose, gpus, nodes, each = key
    gpus = count(nodes) * count(each) if gpus is None else gpus
    amount, before, gpu_hours = sums.get(tuple(whose), (Amount(), 0, 0.0))
    sums[tuple(whose)] = (amount + part, before + attempts, gpu_hours + hours * gpus)


def count_gpus(spec: Mapping[str, Any]) -> int:
    """GPUs that a job holds, of a spec that was not validated."""
    resources = spec.get("resources")
    stated = resources if isinstance(resources, Mapping) else {}
    nodes, each = (stated.get(name) for name in ("nodes", "processes_per_node"))
    return count(str(nodes)) * count(str(each))


def count(text: str | None) -> int:
    """A number of nodes or processes in a spec; 1 where it states none, or nothing that is a number."""
    return int(text) if text is not None and text.isdecimal() and len(text) < 8 else 1


def _sum_closed(
    conn: Connection, keys: Sequence[ColumnElement[Any]], *, project: str | None, windows: Sequence[Window | None]
) -> list[list[Any]]:
    """For each window, rows of the keys, known cents, unknown parts, attempts and hours.

    One pass over the attempts, whatever the number of windows: behind each of them is a job with its whole spec.
    """
    wanted = [END.is_not(None), ~is_rented()]
    wanted += [_JOBS.project == project] if project is not None else []
    spans = (
        select(
            *(key.label(f"key_{place}") for place, key in enumerate(keys)),
            _ATTEMPTS.price_cents_per_hour.label("price"),
            hours(conn, _ATTEMPTS.created_at).label("begun"),
            hours(conn, END).label("ended"),
        )
        .select_from(t.jobs.join(t.attempts, _ATTEMPTS.job_id == _JOBS.id))
        .where(*wanted)
        .limit(ALL)
        .subquery()
    ).c
    columns: list[ColumnElement[Any]] = []
    for window in windows:
        inside, held_h = share(spans, window)
        columns += [
            func.sum(case((inside, spans.price * held_h))),
            func.sum(case((and_(inside, spans.price.is_(None)), 1), else_=0)),
            func.sum(case((inside, 1), else_=0)),
            func.sum(case((inside, held_h))),
        ]
    own = [spans[f"key_{place}"] for place in range(len(keys))]
    size, rows = len(own), conn.execute(select(*own, *columns).group_by(*own)).all()
    return [
        [(*row[:size], row[at] or 0.0, *row[at + 1 : at + 3], row[at + 3]) for row in rows if row[at + 2]]
        for at in range(size, size + 4 * len(windows), 4)
    ]


def share(spans: Any, window: Window | None) -> tuple[ColumnElement[bool], ColumnElement[Any]]:
    """Whether a part of a span lies in a window, and how many hours of it."""
    if window is None:
        return true(), spans.ended - spans.begun
    first, last = (when.timestamp() / 3600 for when in (window.start, window.end))
    start = case((spans.begun < first, first), else_=spans.begun)
    end = case((spans.ended > last, last), else_=spans.ended)
    return and_(spans.begun < last - _INSTANT_H, spans.ended > first + _INSTANT_H), end - start


def job_costs(db: Database, jobs: Collection[str], *, now: datetime) -> dict[str, Amount]:
    """The cost of each of these jobs; one that was never placed has cost nothing."""
    amounts = dict.fromkeys(jobs, Amount())
    if not jobs:
        return {}
    with db.read() as conn:
        for charge in list_charges(conn, jobs=jobs):
            amounts[charge.job_id] += add_up(charge.spans, now=now)
    return amounts


def is_any_priced(db: Database, *, project: str | None = None) -> bool:
    """Whether an attempt of a project, or of any, has a price over 0."""
    query = select(_ATTEMPTS.id).where(_ATTEMPTS.price_cents_per_hour > 0).limit(1)
    if project is not None:
        query = query.join(t.jobs, _JOBS.id == _ATTEMPTS.job_id).where(_JOBS.project == project)
    with db.read() as conn:
        return conn.execute(query).first() is not None


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


def is_rented() -> ColumnElement[bool]:
    machine = t.instances.alias("rented").c
    return select(machine.id).where(machine.attempt == _ATTEMPTS.id).exists()


def hours(conn: Connection, when: ColumnElement[Any]) -> ColumnElement[Any]:
    """Hours since 1970."""
    if conn.dialect.name == "sqlite":
        return (func.julianday(when, type_=Float) - 2440587.5) * 24.0
    return cast(func.extract("epoch", when), Float) / 3600.0


# Few columns and no order: over a year of jobs each of them is a hundred thousand values.
_CHARGES = select(
    _ATTEMPTS.id, _ATTEMPTS.price_cents_per_hour, _ATTEMPTS.created_at, END.label("end"), _JOBS.id.label("job_id"),
    _JOBS.project,
).join(t.jobs, _JOBS.id == _ATTEMPTS.job_id)  # fmt: skip
_ANY_MACHINE = select(_INSTANCES.id).limit(1)


def _charges(conn: Connection, wanted: Sequence[ColumnElement[bool]]) -> list[Charge]:
    query = _CHARGES.where(*wanted)
    rented = _machines(conn, wanted) if conn.execute(_ANY_MACHINE).first() is not None else {}
    return [
        Charge(job_id=job_id, project=project, attempt=attempt,
               spans=_spans(Span(cents_per_hour=price, start=start, end=end), rented.get(attempt, ())))
        for attempt, price, start, end, job_id, project in conn.execute(query).all()
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
