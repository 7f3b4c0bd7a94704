"""The order of one place's queue, decided from the rows: who starts, who is stopped, who waits and why.

Whoever drives the jobs of a place decides every few seconds and keeps the order (`keep`); pages and the API read it
(`list_kept`). To decide it for each who asks would take seconds with 10,000 jobs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from sqlalchemy import Connection, select

from trainmaster.queueing.schedule import schedule
from trainmaster.queueing.state import Decisions, Rules, State, Wait
from trainmaster.store import tables as t
from trainmaster.store.capacity import devices, machines, queue
from trainmaster.store.capacity.queue import WaitingRow
from trainmaster.store.columns import upsert
from trainmaster.store.database import Database


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
) -> Decided:
    """Decide for the jobs that wait at a place.

    `alone` is the only machine of the place: while it is drained, jobs that need none of its devices wait too.
    `late` is why nobody starts on its GPUs now.
    """
    with db.read():
        kept, closed = devices.list_devices(db, place=place), machines.list_machines(db, place=place)
        waiting = queue.to_waiting(rows, machines.find_kinds(kept, closed))
        running = queue.list_holders(db, kept, now=now) if waiting else ()
        shares = devices.list_shares(db) if waiting else {}
    held = {job.job: late for job in waiting if late and job.need.kind == "gpu"}
    if drained := next((row for row in closed if row.machine == alone and row.drained is not None), None):
        need = {job.job for job in waiting}
        why = f"machines closed ({drained.machine}: {machines.explain(drained)})"
        held |= {row.id: why for row in rows if row.id not in need}
    state = State(
        now_s=now.timestamp(), machines=machines.to_machines(kept, closed), running=running,
        waiting=tuple(job for job in waiting if job.job not in held), shares=shares, rules=rules or Rules(),
    )  # fmt: skip
    decisions = schedule(state)
    waits = [Wait(job=job, position=0, why="used", text=text) for job, text in held.items()]
    return Decided(
        decisions=replace(decisions, waits=(*decisions.waits, *waits)),
        projects={job.job: job.project for job in running},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a job waits and why."""

    place: str
    position: int | None  # from 1; None: it has none, the machine is closed
    text: str
    start_s: float | None


def to_places(place: str, waits: Sequence[Wait]) -> dict[str, Place]:
    """What was decided of each job that waits, in order."""
    return {
        wait.job: Place(place=place, position=wait.position or None, text=wait.text, start_s=wait.start_s)
        for wait in waits
    }


def render(waits: Sequence[Wait]) -> str:
    """An order as it is kept. Many jobs have one reason: each is written once."""
    texts: dict[str, int] = {}
    rows = [(wait.job, wait.position, texts.setdefault(wait.text, len(texts)), wait.start_s) for wait in waits]
    return json.dumps({"texts": list(texts), "waits": rows}, separators=(",", ":"))


def keep(conn: Connection, place: str, waits: str, *, at: datetime) -> None:
    """The order of a place, in place of the one before."""
    change = upsert(conn.dialect.name, t.queue_orders, ("place",), ("at", "waits"))
    conn.execute(change, {"place": place, "at": at, "waits": waits})


def list_kept(db: Database, *, since: datetime) -> tuple[set[str], dict[str, Place]]:
    """Places whose order was decided since then, and every job that waits in one, in order."""
    orders = t.queue_orders
    with db.read() as conn:
        rows = conn.execute(select(orders).where(orders.c.at >= since).order_by(orders.c.place)).all()
    jobs: dict[str, Place] = {}
    for row in rows:
        kept = json.loads(row.waits)
        texts = kept["texts"]
        for job, position, text, start_s in kept["waits"]:
            jobs[job] = Place(place=row.place, position=position or None, text=texts[text], start_s=start_s)
    return {row.place for row in rows}, jobs
