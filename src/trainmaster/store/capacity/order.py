"""The order of one place's queue, decided from the rows: who starts, who is stopped, who waits and why.

Whoever drives the jobs of a place decides every few seconds and keeps the order (`keep`); pages and the API read it
(`list_kept`). To decide it for each who asks would take seconds with 10,000 jobs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, select

from trainmaster.core.results import Verdict
from trainmaster.queueing.schedule import schedule
from trainmaster.queueing.state import Decisions, Rules, State, Wait
from trainmaster.store import nodes
from trainmaster.store import tables as t
from trainmaster.store.capacity import budget_hold, devices, machines, queue
from trainmaster.store.capacity.budget_hold import MayCost
from trainmaster.store.capacity.queue import WaitingRow
from trainmaster.store.columns import upsert
from trainmaster.store.database import Database

# For so long a machine is given out last. As long as a fault waits for somebody to look at it: a free machine that is
# first again after some minutes fails a job each time.
LASTS = timedelta(hours=24)
_LONGEST = timedelta(hours=1)  # of a pre-flight: one that began longer ago is over


Checks = Mapping[str, tuple[datetime, Verdict]]  # by machine: the operator's newest check of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What is decided for a place. Jobs that need none of its devices are in it only where they have to wait."""

    decisions: Decisions
    projects: Mapping[str, str]  # of jobs that run there


def decide(
    db: Database,
    place: str,
    rows: Sequence[WaitingRow],
    *,
    now: datetime,
    rules: Rules | None = None,
    alone: str | None = None,
    late: str = "",
    may_cost: MayCost = lambda _, /, *, stated: stated != 0,
    checks: Checks | None = None,
) -> Decided:
    """Decide for the jobs that wait at a place.

    `alone` is the only machine of the place: while it is drained, jobs that need none of its devices wait too.
    `late` is why nobody starts on its GPUs now. `may_cost`: whether jobs on a target may cost something with what
    they state; what may cost something waits while the budget of its project is spent, and has nothing kept for it.
    `checks`: what the operator's own checks said last.
    """
    with db.read() as conn:
        kept, closed = devices.list_devices(db, place=place), machines.list_machines(db, place=place)
        waiting = queue.to_waiting(rows, machines.find_kinds(kept, closed))
        running = queue.list_holders(db, kept, now=now) if waiting else ()
        shares = devices.list_shares(db) if waiting else {}
        suspects = find_suspects(conn, {row.machine for row in kept}, now=now, checks=checks) if waiting else ()
        held = budget_hold.list_held(conn, rows, may_cost=may_cost, now=now)
    held = {job.job: late for job in waiting if late and job.need.kind == "gpu"} | held
    if drained := next((row for row in closed if row.machine == alone and row.drained is not None), None):
        need = {job.job for job in waiting}
        why = f"machines closed ({drained.machine}: {machines.explain(drained)})"
        held = {row.id: why for row in rows if row.id not in need} | held
    state = State(
        now_s=now.timestamp(), machines=machines.to_machines(kept, closed, suspects), running=running,
        waiting=tuple(job for job in waiting if job.job not in held), shares=shares, rules=rules or Rules(),
    )  # fmt: skip
    decisions = schedule(state)
    waits = [Wait(job=job, position=0, why="used", text=text) for job, text in held.items()]
    return Decided(
        decisions=replace(decisions, waits=(*decisions.waits, *waits)),
        projects={job.job: job.project for job in running},
    )


Line = tuple[str, int, int, float | None]  # job, position (0: it has none), number of its text, expected start


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Jobs that wait at a place, in order. Many have one reason: it is there once."""

    place: str
    waits: Sequence[Line]
    texts: Sequence[str]
    jobs: Sequence[str]  # of `waits`
    latest: Sequence[str] = ()  # jobs whose expected start is one at the latest


def to_order(place: str, waits: Sequence[Wait]) -> Order:
    """What was decided of the jobs that wait."""
    texts: dict[str, int] = {}
    lines = [(wait.job, wait.position, texts.setdefault(wait.text, len(texts)), wait.start_s) for wait in waits]
    latest = [wait.job for wait in waits if wait.latest]
    return Order(place=place, waits=lines, texts=list(texts), jobs=[wait.job for wait in waits], latest=latest)


def render(order: Order) -> str:
    """An order as it is kept."""
    kept = {"texts": order.texts, "waits": order.waits, "latest": order.latest}
    return json.dumps(kept, separators=(",", ":"))


@functools.lru_cache(maxsize=16)  # 10,000 jobs are a megabyte, and many ask before it changes
def _parse(place: str, text: str) -> Order:
    kept = json.loads(text)
    jobs, latest = [wait[0] for wait in kept["waits"]], kept.get("latest", ())  # not of an earlier version
    return Order(place=place, waits=kept["waits"], texts=kept["texts"], jobs=jobs, latest=latest)


def keep(db: Database, order: Order, *, at: datetime) -> None:
    """The order of a place, instead of the one before. Who asks in this process need not parse it."""
    row = {"place": order.place, "at": at, "waits": render(order)}
    with db.write() as conn:
        conn.execute(upsert(conn.dialect.name, t.queue_orders, ("place",), ("at", "waits")), row)
    _last.setdefault(db, {})[order.place] = at, order


def list_kept(db: Database, *, since: datetime) -> list[Order]:
    """Orders of places that were decided since then."""
    o, last = t.queue_orders.c, _last.setdefault(db, {})
    orders: list[Order] = []
    with db.read() as conn:
        for place, at in conn.execute(select(o.place, o.at).where(o.at >= since).order_by(o.place)).all():
            before = last.get(place)
            if before is None or before[0] != at:
                waits = conn.execute(select(o.waits).where(o.place == place)).scalar_one()
                before = last[place] = at, _parse(place, waits)
            orders.append(before[1])
    return orders


# By database and place: when the order was decided that was read or kept last, and that order. A megabyte is not read
# again for each who asks. The row is asked for its time every time: where another server has kept an order since, that
# one is read.
_last: WeakKeyDictionary[Database, dict[str, tuple[datetime, Order]]] = WeakKeyDictionary()


def find_suspects(
    conn: Connection, names: Collection[str], *, now: datetime, checks: Checks | None = None
) -> Collection[str]:
    """Machines of one place that jobs get last now: their newest pre-flight, or the operator's newer check, failed.

    A free machine with a fault would take one waiting job after the other and fail each within seconds. It is not
    closed to jobs: what a pre-flight fails is also what a spec expects, and a job must not be able to take a machine
    from the others.
    """
    c, a = t.check_results.c, t.attempts.c
    own = {name: check for name, check in (checks or {}).items() if name in names and check[0] <= now}
    lately = select(a.id).where(a.created_at > now - LASTS - _LONGEST)
    failed = select(c.node).where(c.attempt.in_(lately), c.verdict == Verdict.FAIL.value).distinct()
    bad = {name for name, (_, verdict) in own.items() if verdict is Verdict.FAIL}
    bad |= set(names).intersection(conn.execute(failed).scalars())
    newest = nodes.list_newest_checks(conn, nodes=bad) if bad else {}
    said = {name: (_at(check, now), check.worst) for name, check in newest.items()}
    said |= {name: check for name, check in own.items() if name not in said or check[0] > said[name][0]}
    return [name for name in sorted(bad) if said[name][1] is Verdict.FAIL and said[name][0] > now - LASTS]


def _at(check: nodes.NodeCheck, now: datetime) -> datetime:
    """When it was made; by our own clock where that of the node is ahead."""
    return check.at if check.at is not None and check.at <= now else check.placed_at
