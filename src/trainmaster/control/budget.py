"""Caps on money: a job's own (`limits.max_cost`) and its project's (in all, and for each calendar month in UTC).

Level-triggered and apart from the reconciler: a look reads what is being spent, and asks for a stop where a cap is
reached. From prices and times it knows when the next cap can be reached, and looks again then, or after `LOOK_S`, in
which a job may have begun. Several may look at once: an attempt is asked to stop once, and each notification is
inserted once.

A stop is requested in the attempt's row (store/attempts.py). The reconciler signals the target, the workload saves
within `limits.grace_s`, and the job ends as failed with the reason `over_budget`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from trainmaster import targets
from trainmaster.control import failpoints
from trainmaster.control.clock import Clock
from trainmaster.control.context import log_failure
from trainmaster.control.notify import outbox
from trainmaster.core.errors import OverBudget
from trainmaster.core.money.cost import Amount, Span, add_up, burn, dollars, reached_at, round_cents
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import Reason
from trainmaster.store import attempts, costs
from trainmaster.store.capacity import budget_hold
from trainmaster.store.costs import BudgetRow
from trainmaster.store.database import Connection, Database
from trainmaster.store.heads import JobHead
from trainmaster.store.outbox import is_known
from trainmaster.store.rows import JobRow
from trainmaster.store.spending import Spending, list_spending

WARN_AT = 0.8  # of a cap
LOOK_S = 10.0  # a job that begins between two looks overruns a cap by at most so much

log = logging.getLogger(__name__)


def price_of(spec: JobSpec, handle: Mapping[str, Any] | None) -> float | None:
    """Cents an hour for the whole attempt, None if unknown: as the spec or the target's handle states it.

    Of two, the higher one: a spec cannot make a machine cheaper than its target charges. A machine of a target that is
    not paid costs nothing unless the spec or the operator (`serve --gpu-hour-price`) states a price.
    """
    prices = []
    if spec.resources.price_per_hour is not None:
        prices.append(spec.resources.price_per_hour * 100)
    charged = (handle or {}).get("price_cents_per_hour")
    if isinstance(charged, (int, float)) and not isinstance(charged, bool) and math.isfinite(charged) and charged >= 0:
        prices.append(float(charged))
    return max(prices) if prices else 0.0 if targets.is_free(spec.target) else None


def may_cost(spec: JobSpec, word: str, *, price: float | None) -> bool:
    """Whether a spent budget keeps an attempt from its target: all but what is known to cost nothing.

    Of a rented machine that is not chosen yet the price is what the spec states; a stated 0 is no price of it.
    """
    return price != 0 or targets.may_cost(word, stated=spec.resources.price_per_hour)


def admit(conn: Connection, project: str, *, paid: bool, now: datetime) -> None:
    """OverBudget, with the numbers, where a project has spent what it may. What costs nothing is always admitted."""
    if paid and (found := budget_hold.find_spent(conn, project, now=now)) is not None:
        raise OverBudget(
            f"{found.text}; ask an administrator of the server to raise it (`trainmaster cost --set-cap "
            f"{project}=DOLLARS/{found.period}`)",
            project=project,
        )


def find_hold(db: Database, job: JobRow, *, price: float | None, now: datetime) -> str | None:
    """Why a job waits in the queue: the budget of its project is spent. None where it may start."""
    if not may_cost(job.spec, job.target, price=price):
        return None
    with db.read() as conn:
        found = budget_hold.find_spent(conn, job.project, now=now)
    return found.why if found is not None else None


def refuse_start(db: Database, job: JobRow, *, now: datetime) -> str | None:
    """Why no further attempt of a job may ever be placed: its own cap is spent. None if it may."""
    cap = job.spec.limits.max_cost
    if cap is None or (job.attempts == 0 and job.spec.resume_from is None):
        return None
    with db.read() as conn:
        run = [job.id, *costs.list_run(conn, job.spec.resume_from)]
        spans = (span for charge in costs.list_charges(conn, jobs=run) for span in charge.spans)
        amount = add_up(spans, now=now)
    if amount.known_cents < cap * 100:
        return None
    return f"limits.max_cost is spent: {budget_hold.figures(amount, cap * 100)}"


def note_uncounted(db: Database, job: JobRow) -> str | None:
    """A sentence for the owner of a job without a price whose project has a budget; None for all others."""
    stated = job.spec.resources.price_per_hour
    if stated is not None or targets.may_cost(job.target, stated=stated):
        return None
    with db.read() as conn:
        if not costs.list_budgets(conn, project=job.project):
            return None
    return (
        f"this job has no price and does not count towards the budget of project {job.project}; "
        "state one with resources.price_per_hour"
    )


def counts(db: Database, job: JobRow | JobHead) -> bool:
    """Whether a job has cost something, or nobody knows what, in a project with a budget."""
    with db.read() as conn:
        if not costs.list_budgets(conn, project=job.project):
            return False
        return any(
            span.cents_per_hour != 0 for charge in costs.list_charges(conn, jobs=[job.id]) for span in charge.spans
        )


async def run(db: Database, *, stop: asyncio.Event, look_s: float = LOOK_S, home: Path | None = None) -> None:
    """Hold the caps until `stop` is set."""
    clock = Clock(home)
    while not stop.is_set():
        rest_s = look_s
        try:
            following = await asyncio.to_thread(enforce, db, clock=clock)
            if following is not None:
                rest_s = min(look_s, max(0.05, (following - clock.now()).total_seconds()))
        except Exception as error:  # a database that restarts must not end the watch over the money
            log_failure(log, "the budgets could not be looked at; trying again", error)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), rest_s)


def enforce(db: Database, *, now: datetime | None = None, clock: Clock | None = None) -> datetime | None:
    """Ask for a stop where a cap is reached and tell of it; when the next can be, if all goes on as it does."""
    clock = clock if clock is not None else Clock()
    now = now if now is not None else clock.now()
    with db.read() as conn:
        budgets = costs.list_budgets(conn)
        running = list_spending(conn, capped=not budgets)
        limits = [*_job_limits(conn, running, now, clock), *_project_limits(conn, running, budgets, now, clock)]
    coming = [_hold(db, limit, now) for limit in limits]
    return min((when for when in coming if when is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    """A cap, how near it is, and who has to stop when it is reached."""

    about: str  # tells this cap and its amount apart in news: a raised cap is reported again
    words: str
    project: str
    cap_cents: float
    spent: Amount
    burn: float
    running: tuple[Spending, ...]
    job_id: str | None = None  # None: a project's
    budget: BudgetRow | None = None


def _job_limits(conn: Connection, running: list[Spending], now: datetime, clock: Clock) -> Iterator[_Limit]:
    capped = {job.job_id: job for job in running if job.max_cost is not None}
    # A cap holds for the whole run: what earlier jobs of it cost counts too.
    runs = {job_id: {job_id, *costs.list_run(conn, job.resume_from)} for job_id, job in capped.items()}
    charges = costs.list_charges(conn, jobs={job_id for run in runs.values() for job_id in run}) if capped else []
    spans: dict[str, list[Span]] = {
        job_id: [clock.correct(span, now=now) for c in charges if c.job_id in run for span in c.spans]
        for job_id, run in runs.items()
    }
    for job_id, job in capped.items():
        assert job.max_cost is not None
        yield _Limit(
            about=f"{job.max_cost:g}",
            words="limits.max_cost",
            project=job.project,
            cap_cents=job.max_cost * 100,
            spent=add_up(spans[job_id], now=now),
            burn=burn(spans[job_id]),
            running=(job,),
            job_id=job_id,
        )


def _project_limits(
    conn: Connection, running: list[Spending], budgets: list[BudgetRow], now: datetime, clock: Clock
) -> Iterator[_Limit]:
    for budget in budgets:
        window = budget.window(now)
        charges = costs.list_charges(conn, project=budget.project, window=window, closed=False)
        closed = costs.sum_closed(conn, project=budget.project, window=window).get(budget.project, Amount())
        spans = [clock.correct(span, now=now) for charge in charges for span in charge.spans]
        free = {charge.attempt for charge in charges if all(span.cents_per_hour == 0 for span in charge.spans)}
        yield _Limit(
            about=f"{budget.project} {budget.label(now)} {budget.cap_cents}",
            words=budget_hold.describe(budget, now),
            project=budget.project,
            cap_cents=budget.cap_cents,
            spent=closed + add_up(spans, now=now, window=window),
            burn=burn(spans),
            running=tuple(job for job in running if job.project == budget.project and job.attempt not in free),
            budget=budget,
        )


def _hold(db: Database, limit: _Limit, now: datetime) -> datetime | None:
    """Hold one cap: stop and tell, warn, or say when to look again."""
    spent, cap = limit.spent.known_cents, limit.cap_cents
    figures = budget_hold.figures(limit.spent, cap)
    if limit.job_id is not None and limit.spent.unknown and limit.running[0].begun:
        # A cap that cannot be counted is not held, and this job was only let in under one.
        why = f"its price is not known, so {limit.words} of {dollars(cap)} cannot be held"
        _stop(db, limit, f"{why}; state resources.price_per_hour", now)
    elif spent >= cap:
        _stop(db, limit, f"{limit.words} is spent: {figures}", now)
    elif spent >= WARN_AT * cap:
        _warn(db, limit, f"{limit.words} is nearly spent: {figures}", now)
        return reached_at(cap, spent_cents=spent, cents_per_hour=limit.burn, now=now)
    else:
        return reached_at(WARN_AT * cap, spent_cents=spent, cents_per_hour=limit.burn, now=now)
    return None


def _stop(db: Database, limit: _Limit, message: str, now: datetime) -> None:
    notified = _is_notified(db, limit, "budget.exceeded") or (limit.budget is not None and limit.spent.known_cents == 0)
    asked = all(job.stopping for job in limit.running)
    if notified and asked:
        return
    with failpoints.around("commit cap"), db.write() as conn:
        for job in limit.running:
            if attempts.request_stop(conn, job.attempt, reason=Reason.OVER_BUDGET, message=message, at=now):
                log.warning("job %s is asked to stop: %s", job.job_id, message)
        if not notified:
            _tell(conn, limit, "budget.exceeded", message, now)


def _warn(db: Database, limit: _Limit, message: str, now: datetime) -> None:
    if _is_notified(db, limit, "budget.warning"):
        return
    with failpoints.around("commit warning"), db.write() as conn:
        _tell(conn, limit, "budget.warning", message, now)
        if limit.budget is not None:
            costs.mark_warned(conn, limit.budget.id, at=now)


def _is_notified(db: Database, limit: _Limit, topic: str) -> bool:
    with db.read() as conn:
        return is_known(conn, _key(limit, topic))


def _tell(conn: Connection, limit: _Limit, topic: str, message: str, now: datetime) -> None:
    job = limit.running[0] if limit.job_id is not None else None
    payload = {
        "job": job and job.job_id,
        "name": job and job.name,
        "project": limit.project,
        "status": job and job.status,
        "reason": Reason.OVER_BUDGET.value,
        "message": message,
        "action": Reason.OVER_BUDGET.rule.action,
        "url": f"/jobs/{job.job_id}" if job is not None else f"/?project={limit.project}",
        "at": now.isoformat(timespec="milliseconds"),
        "spent_cents": round_cents(limit.spent.known_cents),
        "cap_cents": round_cents(limit.cap_cents),
        "unknown": limit.spent.unknown,
    }
    key, project = _key(limit, topic), limit.project
    outbox.put(conn, key=key, topic=topic, project=project, job_id=limit.job_id, payload=payload, at=now)


def _key(limit: _Limit, topic: str) -> str:
    return f"{topic} {limit.job_id or 'project'} {limit.about}"
