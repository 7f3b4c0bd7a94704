"""Costs by project, person, target and month; budgets with what is left and a forecast; rented machines that idle."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime, timedelta

from trainmaster import targets
from trainmaster.api.codec import fill
from trainmaster.api.costs import BudgetOutlook, GoingJob, IdleMachine, Spending
from trainmaster.core.money.cost import Span, add_up, burn, month_of, reached_by, round_cents
from trainmaster.core.states import Stage, Status
from trainmaster.pages.cost import cap_cents, list_earlier, list_spent
from trainmaster.pages.parts.usage import add_groups, by_person, by_project, by_target, cost_of, line_of, list_lines
from trainmaster.store import costs, instances
from trainmaster.store.capacity import eta
from trainmaster.store.costs import BudgetRow, Charge
from trainmaster.store.database import Database
from trainmaster.store.instances import HeldMachine
from trainmaster.store.page_rows.kept_sums import Recall
from trainmaster.store.page_rows.runs import find_jobs, find_runs

_MOST_GOING = 50  # jobs; `trainmaster cost` lists more
MONTHS = 6  # shown, the present one included
_WAIT_S = 600.0  # a machine that waits longer for the others of its job is idle
_BEFORE_WORK = (Stage.PLACING, Stage.PROVISIONING, Stage.CONNECTING)


def read(
    db: Database, *, project: str | None = None, month: datetime | None = None, now: datetime | None = None
) -> Spending:
    """The costs of a project or of all, in the month that a time is in or from the beginning."""
    now = now or datetime.now(UTC)
    window = month_of(month) if month is not None else None
    with db.read() as conn:
        charges = costs.list_charges(conn, project=project, closed=False)
        last = [month_of(start) for start in _last_months(now)]
        windows = list(dict.fromkeys([window, None, *last]))
        free = [name for name in targets.names() if targets.is_free(name)]
        sums = costs.sum_groups(
            conn, charges, project=project, free=free, now=now, windows=windows, recall=Recall(db, conn)
        )
        rows = costs.list_budgets(conn, project=project)
        going = [charge for charge in charges if charge.is_open]
        ids = {charge.job_id for charge in going}
        unpriced = costs.list_unpriced(conn, free=free, jobs=ids) if ids else set()
        held = instances.list_held_machines(conn, project=project)
    by_window = dict(zip(windows, sums, strict=True))
    groups, months = by_window[window], [(f"{month.start:%Y-%m}", by_window[month]) for month in last]
    spent = {
        row.id: add_groups(group for group in by_window[row.window(now)] if group.project == row.project)
        for row in rows
    }
    ends_s, bounded = _expected_ends(db, going, now=now)
    rest_s = (month_of(now).end - now).total_seconds()
    rates = _rates(going)
    ahead = {job: rates[job] * min(ends_s[job], rest_s) / 3600 for job in rates}
    this_month = next(groups for name, groups in months if name == f"{now:%Y-%m}")
    total, unknown = add_groups(groups)
    dearest = max(add_groups(part)[0] for _, part in months)
    unknown_going = sum(_is_unknown(charge, unpriced) for charge in going)
    known = add_groups(this_month)[0] + sum(ahead.values())
    return Spending(
        month=f"{window.start:%Y-%m}" if window is not None else None,
        project=project,
        known_cents=round_cents(total),
        unknown_parts=unknown,
        cents_per_hour=sum(burn(charge.spans) for charge in going),
        unknown_going=unknown_going,
        forecast_cents=round_cents(known) if known or not (unknown_going or add_groups(this_month)[1]) else None,
        bounded_jobs=len(bounded),
        gpu_hours=math.fsum(group.gpu_hours for group in groups),
        failed=cost_of(groups, Status.FAILED),
        limited=cost_of(groups, Status.FAILED, limited=True),
        cancelled=cost_of(groups, Status.CANCELLED),
        projects=list_lines(groups, by_project),
        people=list_lines(groups, by_person),
        targets=list_lines(groups, by_target),
        months=tuple(line_of(name, part, whole=dearest) for name, part in months),
        budgets=tuple(
            _outlook(row, spent[row.id], [(rates[job], ends_s[job]) for job in _of(going, row.project)], rest_s, now)
            for row in rows
        ),
        idle=tuple(_idle(machine, why, since, now) for machine in held for why, since in _why_idle(machine, now)),
        going=_list_going(db, going, unpriced, now=now),
        going_total=len(ids),
        made_at=now,
    )


def _list_going(
    db: Database, going: Sequence[Charge], unpriced: Collection[str], *, now: datetime
) -> tuple[GoingJob, ...]:
    """Jobs that hold machines now, the dearest an hour first, those of unknown price last."""
    rates: dict[str, float | None] = {}
    for charge in going:
        before = rates.get(charge.job_id, 0.0)
        known = before is not None and not _is_unknown(charge, unpriced)
        rates[charge.job_id] = (before or 0.0) + burn(charge.spans) if known else None
    shown = sorted(rates, key=lambda job: (-(rates[job] or 0.0), rates[job] is None, job))[:_MOST_GOING]
    with db.read() as conn:
        rows = find_runs(conn, shown)
    spent = list_spent(db, shown, now=now)
    held: defaultdict[str, float] = defaultdict(float)
    for charge in going:
        # Of rented machines each has a span of its own.
        held[charge.job_id] += sum(span.seconds(now=now) for span in charge.spans) / len(charge.spans) / 3600
    gpus = {job: costs.count_gpus(rows[job].spec) for job in rows}
    return tuple(
        fill(
            GoingJob,
            rows[job],
            gpus=gpus[job],
            gpu_hours=held[job] * gpus[job],
            cents_per_hour=rates[job],
            cents=spent[job],
        )
        for job in shown
        if job in rows
    )


def _last_months(now: datetime) -> list[datetime]:
    """The beginnings of the last months, newest first."""
    listed: list[datetime] = []
    when = now
    for _ in range(MONTHS):
        window = month_of(when)
        listed.append(window.start)
        when = window.start - timedelta(days=1)
    return listed


def _rates(going: Sequence[Charge]) -> dict[str, float]:
    """By job: cents an hour now, as far as its prices are known."""
    spans: defaultdict[str, list[Span]] = defaultdict(list)
    for charge in going:
        spans[charge.job_id].extend(charge.spans)
    return {job: burn(each) for job, each in spans.items()}


def _of(going: Sequence[Charge], project: str) -> set[str]:
    """Jobs of a project."""
    return {charge.job_id for charge in going if charge.project == project}


def _expected_ends(db: Database, going: Sequence[Charge], *, now: datetime) -> tuple[dict[str, float], frozenset[str]]:
    """By job: seconds for which it goes on at its present rate, infinite where nothing says; and those whose pace is
    not known.

    Its own limits end it earlier: `timeout_s` the present attempt, `max_cost` the run, so that what its earlier jobs
    cost counts too.
    """
    rates = _rates(going)
    rows = find_jobs(db, [job for job, rate in rates.items() if rate > 0])
    left, timeouts = eta.list_left(db, rows, now=now), eta.list_timeouts(db, rows, now=now)
    ends_s = {job: min(left.get(job, math.inf), timeouts.get(job, math.inf)) for job in rates}
    caps = {row.id: cap for row in rows if (cap := cap_cents(row)) is not None}
    if caps:
        with db.read() as conn:
            spent = dict.fromkeys(caps, 0.0) | list_earlier(conn, rows, now=now)
            for charge in costs.list_charges(conn, jobs=caps):
                spent[charge.job_id] += add_up(charge.spans, now=now).known_cents
        for job, cap in caps.items():
            ends_s[job] = min(ends_s[job], max(0.0, cap - spent[job]) / rates[job] * 3600)
    return ends_s, frozenset(row.id for row in rows if row.id not in left)


def _is_unknown(charge: Charge, unpriced: Collection[str]) -> bool:
    """Whether what an attempt costs now is unknown, or 0 only because nobody stated a price."""
    prices = [span.cents_per_hour for span in charge.spans if span.end is None]
    return None in prices or (charge.job_id in unpriced and not any(prices))


def _outlook(
    row: BudgetRow, sums: tuple[float, int], going: Sequence[tuple[float, float]], rest_s: float, now: datetime
) -> BudgetOutlook:
    """`going`: cents an hour of each job, and seconds until its end; `rest_s`: until that of the month."""
    spent, unknown = sums
    in_month = row.period == "month"
    when = reached_by(row.cap_cents, spent_cents=spent, going=going, now=now)
    if in_month and when is not None and when >= month_of(now).end:
        when = None
    ahead = math.fsum(rate * min(ends_s, rest_s) / 3600 for rate, ends_s in going)
    return BudgetOutlook(
        project=row.project,
        period=row.period,
        cap_cents=row.cap_cents,
        spent_cents=round_cents(spent),
        left_cents=round_cents(row.cap_cents - spent),
        share=spent / row.cap_cents if row.cap_cents else None,
        forecast_cents=round_cents(spent + ahead) if in_month else None,
        reached_at=when,
        unknown_parts=unknown,
    )


def _why_idle(machine: HeldMachine, now: datetime) -> Iterable[tuple[str, datetime]]:
    """Why a machine is idle and since when; nothing for one that works, or is on its way."""
    if machine.state == "lost":
        yield "the provider no longer lists it, and has not confirmed its end", machine.launched_at
    elif machine.stage is None:
        yield "its job is over and it is not given back", machine.attempt_ended_at or machine.launched_at
    elif machine.attempt_ended_at is not None:
        yield "its attempt has ended", machine.attempt_ended_at
    elif machine.stalled_at is not None:
        yield "its job has stalled", machine.stalled_at
    elif machine.stage in _BEFORE_WORK and (now - machine.launched_at).total_seconds() > _WAIT_S:
        yield f"it waits for its job, which is {machine.stage}", machine.launched_at


def _idle(machine: HeldMachine, why: str, since: datetime, now: datetime) -> IdleMachine:
    hours = max(0.0, (now - since).total_seconds()) / 3600
    cents = round_cents(machine.cents_per_hour * hours) if machine.cents_per_hour is not None else None
    return fill(IdleMachine, machine, why=why, since=since, cents=cents)
