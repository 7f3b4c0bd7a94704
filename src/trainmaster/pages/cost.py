"""What jobs and projects cost: in a month or in all, with what each job will have cost, and what projects may spend."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from trainmaster import targets
from trainmaster.api.costs import Bound, BudgetLine, CostPage, JobSpending, ProjectSpending
from trainmaster.core.money.cost import Amount, Cents, Span, Window, add_up, burn, forecast, month_of, round_cents
from trainmaster.core.states import Status
from trainmaster.pages.parts.usage import by_person, by_project, by_target, cost_of, list_lines
from trainmaster.store import costs
from trainmaster.store.capacity import eta
from trainmaster.store.columns import slices
from trainmaster.store.costs import Charge
from trainmaster.store.database import Connection, Database
from trainmaster.store.page_rows import cost_sums
from trainmaster.store.page_rows.cost_sums import ClosedSums, JobSum
from trainmaster.store.page_rows.kept_sums import Recall
from trainmaster.store.page_rows.runs import PriceRow, find_jobs
from trainmaster.store.page_rows.runs import list_prices as list_price_rows
from trainmaster.store.rows import JobRow

MOST = 200  # jobs on one page
_NOTHING = ClosedSums(projects={}, dearest={}, others={})


def read(
    db: Database,
    *,
    job: str | None = None,
    project: str | None = None,
    month: datetime | None = None,
    limit: int = 50,
    now: datetime | None = None,
) -> CostPage:
    """Costs of one job, of a project or of all; in the month that a time is in, or from the beginning."""
    now = now or datetime.now(UTC)
    window = month_of(month) if month is not None else None
    most = max(1, min(limit, MOST))
    free = _free_targets()
    with db.read() as conn:
        budgets = costs.list_budgets(conn, project=project) if job is None else []
        windows = list(dict.fromkeys([window, *(row.window(now) for row in budgets)]))
        if job is not None:  # all of its charges: there are few
            charges, closed = costs.list_charges(conn, jobs=[job]), [_NOTHING]
        else:
            recall = Recall(db, conn)
            closed, ids = recall(
                ("jobs", project, tuple(free), most, *windows),
                lambda: cost_sums.sum_jobs(conn, project=project, free=free, windows=windows, most=most),
            )
            charges = costs.list_charges(conn, jobs=ids, closed=False) if ids else []
        by_window = dict(zip(windows, closed, strict=True))
        groups: list[costs.GroupSum] = []
        if job is None:
            (groups,) = costs.sum_groups(
                conn, charges, project=project, free=free, now=now, windows=[window], recall=recall
            )
        going = {when: _add_charges(each.others, charges, when, now=now) for when, each in by_window.items()}
        # Asked only where a cost of nothing is to be judged: the stated prices are in the specs.
        unpaid = {job_id for part in going.values() for job_id, each in part.items() if each.known_cents == 0}
        unpriced = _list_unpriced(conn, unpaid)
        projects = {when: _projects(each.projects, going[when], unpriced) for when, each in by_window.items()}
        rates: defaultdict[str, float] = defaultdict(float)
        for charge in charges:
            if charge.job_id in going[window]:
                rates[charge.project] += burn(charge.spans)
        sums = {**by_window[window].dearest, **going[window]}
        dearest = heapq.nsmallest(most, sums, key=lambda job_id: (-sums[job_id].known_cents, job_id))
        rows = find_jobs(db, dearest)
        spans: dict[str, list[Span]] = {job_id: [] for job_id in dearest}
        for charge in costs.list_charges(conn, jobs=dearest) if dearest else ():
            spans[charge.job_id].extend(charge.spans)
        earlier = list_earlier(conn, rows, now=now)
    gpu_hours = {line.name: line.gpu_hours for line in list_lines(groups, by_project)}
    left, timeouts = eta.list_left(db, rows, now=now), eta.list_timeouts(db, rows, now=now)
    return CostPage(
        month=f"{window.start:%Y-%m}" if window is not None else None,
        project=project,
        jobs=tuple(
            _job(
                row, spans[row.id], sums[row.id], left.get(row.id), timeout_s=timeouts.get(row.id),
                earlier_cents=earlier.get(row.id, 0.0), now=now,
            )
            for row in rows
        ),
        more=sum(each.jobs for each in projects[window].values()) - len(rows),
        projects=tuple(
            _project(each, rates[each.project], gpu_hours.get(name, 0.0))
            for name, each in sorted(projects[window].items())
        ),
        failed=cost_of(groups, Status.FAILED) if job is None else None,
        limited=cost_of(groups, Status.FAILED, limited=True) if job is None else None,
        cancelled=cost_of(groups, Status.CANCELLED) if job is None else None,
        people=list_lines(groups, by_person),
        targets=list_lines(groups, by_target),
        budgets=tuple(_budget(row, projects[row.window(now)].get(row.project)) for row in budgets),
        made_at=now,
    )  # fmt: skip


class Figures(NamedTuple):
    """Cost of a job, as `round_cents` gives it."""

    so_far: Cents | None = None
    at_end: Cents | None = None
    bound: Bound | None = None  # the limit that the forecast is made of; None: the pace of the job


def figures(db: Database, listed: Iterable[JobRow], *, now: datetime) -> dict[str, Figures]:
    """Cost so far and forecast of each of these jobs, for a page of other things too."""
    rows = list(listed)
    spans: dict[str, list[Span]] = {row.id: [] for row in rows}
    with db.read() as conn:
        for charge in costs.list_charges(conn, jobs=spans) if spans else ():
            spans[charge.job_id].extend(charge.spans)
        # Most jobs are over or cost nothing: their forecast is what they cost, and needs no look at their events.
        going = [row for row in rows if row.stage is not None and any(span.cents_per_hour for span in spans[row.id])]
        earlier = list_earlier(conn, going, now=now)
    left, timeouts = eta.list_left(db, going, now=now), eta.list_timeouts(db, going, now=now)
    by_job: dict[str, Figures] = {}
    for row in rows:
        if is_unpriced(row, spans[row.id]):
            by_job[row.id] = Figures()
            continue
        amount, per_hour = add_up(spans[row.id], now=now), burn(spans[row.id])
        left_s, timeout_s = 0.0 if row.stage is None else left.get(row.id), timeouts.get(row.id)
        ahead = forecast_job(
            row, amount, per_hour, left_s=left_s, timeout_s=timeout_s, earlier_cents=earlier.get(row.id, 0.0)
        )
        bound = find_bound(amount, ahead, per_hour, left_s=left_s, timeout_s=timeout_s)
        by_job[row.id] = Figures(round_cents(amount.cents), ahead, bound)
    return by_job


class Price(NamedTuple):
    """Who submitted a job, and its price."""

    submitted_by: str | None  # name of the token; None: the command line on the home folder
    cents_per_hour: float | None  # for all its machines; None: unknown


def list_prices(db: Database, ids: Collection[str]) -> dict[str, Price]:
    """By job: who submitted it, and the price of its newest attempt an hour; before the first, the one it states."""
    with db.read() as conn:
        rows = list_price_rows(conn, ids) if ids else {}
    return {job_id: Price(row.submitted_by, _price(row)) for job_id, row in rows.items()}


def _price(row: PriceRow) -> float | None:
    if row.cents_per_hour is None:
        return None if row.stated is None else 100 * float(row.stated)
    is_default = row.cents_per_hour == 0 and row.stated is None and targets.is_free(row.target)
    return None if is_default else row.cents_per_hour


def list_spent(db: Database, ids: Sequence[str], *, now: datetime) -> dict[str, Cents | None]:
    """Cost so far of each of these jobs, as `figures` gives it, without reading the jobs themselves."""
    return {job_id: round_cents(cents) for job_id, cents in list_exact(db, ids, now=now).items()}


def list_exact(db: Database, ids: Sequence[str], *, now: datetime) -> dict[str, float | None]:
    """The same before it is rounded, to be summed."""
    spans: dict[str, list[Span]] = {job_id: [] for job_id in ids}
    with db.read() as conn:
        for charge in costs.list_charges(conn, jobs=ids) if ids else ():
            spans[charge.job_id].extend(charge.spans)
        # Asked only of jobs without a price in their spans: the stated prices are in the specs.
        free = [job_id for job_id, own in spans.items() if all(span.cents_per_hour == 0 for span in own)]
        unpriced = _list_unpriced(conn, free)
    return {job_id: None if job_id in unpriced else add_up(own, now=now).cents for job_id, own in spans.items()}


def _list_unpriced(conn: Connection, jobs: Collection[str]) -> set[str]:
    """Which of these jobs state no price and are on a target where none is known."""
    ids, unpriced = sorted(jobs), set[str]()
    for some in slices(ids):
        unpriced |= costs.list_unpriced(conn, free=_free_targets(), jobs=some)
    return unpriced


def is_unpriced(row: JobRow, spans: Sequence[Span]) -> bool:
    """Whether the price 0 is only a default: this machine is not free, its price is unknown. No cap counts it."""
    stated = not targets.is_free(row.target) or row.spec.resources.price_per_hour is not None
    return not stated and all(span.cents_per_hour == 0 for span in spans)


def _free_targets() -> list[str]:
    return [name for name in targets.names() if targets.is_free(name)]


def forecast_job(
    row: JobRow,
    amount: Amount,
    per_hour: float,
    *,
    left_s: float | None,
    timeout_s: float | None,
    earlier_cents: float,
) -> Cents | None:
    """What a job will have cost; its own limits bound it, and are all that is known where its pace is not."""
    if left_s is None and row.spec.resources.price_per_hour == 0 and not targets.may_cost(row.target, stated=0):
        left_s = 0.0  # for however long it runs, it costs nothing more
    return round_cents(
        forecast(
            amount,
            cents_per_hour=per_hour,
            left_s=left_s,
            timeout_s=timeout_s,
            cap_cents=cap_cents(row),
            earlier_cents=earlier_cents,
        )
    )


def find_bound(
    amount: Amount, ahead: Cents | None, per_hour: float, *, left_s: float | None, timeout_s: float | None
) -> Bound | None:
    """The limit that a forecast is made of, where nothing says how long the job still needs."""
    if ahead is None or left_s is not None or not per_hour:
        return None
    at_timeout = amount.known_cents + per_hour * timeout_s / 3600 if timeout_s is not None else math.inf
    # The cap is the lower one where it is what the forecast came to; both are rounded.
    return "timeout_s" if at_timeout <= ahead + 1 else "max_cost"


def cap_cents(row: JobRow) -> float | None:
    """Its own cap, which holds for its whole run; not rounded: it may be under a cent."""
    cap = row.spec.limits.max_cost
    return None if cap is None else cap * 100


def list_earlier(conn: Connection, rows: Iterable[JobRow], *, now: datetime) -> dict[str, float]:
    """By open job with a cap that resumes another: what the other jobs of its run cost, for they count towards it."""
    capped = {
        row.id: row.spec.resume_from
        for row in rows
        if row.stage is not None and row.spec.resume_from is not None and row.spec.limits.max_cost is not None
    }
    runs = {first: costs.list_run(conn, first) for first in set(capped.values())}
    spent = dict.fromkeys((job_id for run in runs.values() for job_id in run), 0.0)
    for charge in costs.list_charges(conn, jobs=spent) if spent else ():
        spent[charge.job_id] += add_up(charge.spans, now=now).known_cents
    return {
        job_id: math.fsum(spent[other] for other in runs[first] if other != job_id) for job_id, first in capped.items()
    }


def _job(
    row: JobRow,
    spans: list[Span],
    sums: JobSum,
    left_s: float | None,
    *,
    timeout_s: float | None,
    earlier_cents: float,
    now: datetime,
) -> JobSpending:
    per_hour, unpriced = burn(spans), is_unpriced(row, spans)
    whole = add_up(spans, now=now)
    ahead = forecast_job(row, whole, per_hour, left_s=left_s, timeout_s=timeout_s, earlier_cents=earlier_cents)
    return JobSpending(
        id=row.id,
        name=row.name,
        project=row.project,
        status=row.status,
        cents=None if unpriced or sums.unknown else round_cents(sums.known_cents),
        known_cents=round_cents(sums.known_cents),
        cents_per_hour=per_hour,
        left_s=left_s,
        forecast_cents=None if unpriced else ahead,
        max_cost_cents=round_cents(cap_cents(row)),
        submitted_by=row.submitted_by,
        forecast_bound=find_bound(whole, ahead, per_hour, left_s=left_s, timeout_s=timeout_s),
    )


def _add_charges(
    closed: Mapping[str, JobSum], charges: Iterable[Charge], window: Window | None, *, now: datetime
) -> dict[str, JobSum]:
    """By job, what these charges came to, added to its closed ones."""
    sums = dict(closed)
    for charge in charges:
        if window is None or charge.touches(window, now=now):
            before = sums.get(charge.job_id) or JobSum(charge.project, 0.0, 0)
            amount = add_up(charge.spans, now=now, window=window)
            known, unknown = before.known_cents + amount.known_cents, before.unknown + amount.unknown
            sums[charge.job_id] = JobSum(charge.project, known, unknown)
    return sums


def _projects(
    closed: Mapping[str, JobSum], going: Mapping[str, JobSum], unpriced: Collection[str]
) -> dict[str, JobSum]:
    """By project: its sums. Unknown is a job with a part without a price, or with a price of 0 that nobody stated."""
    sums = dict(closed)
    for job_id, each in going.items():
        before = sums.get(each.project) or JobSum(each.project, 0.0, 0, 0)
        unknown = each.unknown > 0 or (each.known_cents == 0 and job_id in unpriced)
        known = before.known_cents + each.known_cents
        sums[each.project] = JobSum(each.project, known, before.unknown + unknown, before.jobs + 1)
    return sums


def _project(sums: JobSum, per_hour: float, gpu_hours: float) -> ProjectSpending:
    known = round_cents(sums.known_cents)
    return ProjectSpending(
        project=sums.project,
        jobs=sums.jobs,
        unknown_jobs=sums.unknown,
        cents=None if sums.unknown else known,
        known_cents=known,
        cents_per_hour=per_hour,
        gpu_hours=gpu_hours,
    )


def _budget(row: costs.BudgetRow, sums: JobSum | None) -> BudgetLine:
    spent = sums.known_cents if sums is not None else 0.0
    return BudgetLine(
        project=row.project,
        period=row.period,
        cap_cents=row.cap_cents,
        spent_cents=round_cents(spent),
        share=spent / row.cap_cents if row.cap_cents else None,
        unknown_jobs=sums.unknown if sums is not None else 0,
    )
