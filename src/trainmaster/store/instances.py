"""Rented machines: intent, launch, what the provider's listing said, end. A row exists before the machine may.

intended → launching → active → terminating → gone
intended is safe to launch; launching without a provider_id is unknown: only the listing tells; gone is final
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, insert, select, update

from trainmaster.api.nodes import Instance
from trainmaster.store import tables as t
from trainmaster.store.columns import slices
from trainmaster.store.database import Database

WANTED = ("intended", "launching", "active")
_BAD_SEARCHED = 500  # newest rows that are searched for machines returned as bad
_I = t.instances.c


def insert_intent(
    conn: Connection, attempt: str, *, target: str, nonce: str, kind: str, region: str, cents_per_hour: float,
    at: datetime,
) -> None:  # fmt: skip
    """A machine to launch. Its name is committed before the request is sent."""
    row = {"attempt": attempt, "target": target, "nonce": nonce, "kind": kind, "region": region, "state": "intended"}
    conn.execute(insert(t.instances).values(**row, price_cents_per_hour=cents_per_hour, created_at=at))


def begin_launch(conn: Connection, nonce: str, *, at: datetime) -> bool:
    """The launch request is about to be sent; False if another reconciler was first. Never twice for one name."""
    row = update(t.instances).where(_I.nonce == nonce, _I.state == "intended")
    return conn.execute(row.values(state="launching", launched_at=at)).rowcount == 1


def set_found(conn: Connection, nonce: str, *, provider_id: str, address: str | None = None, active: bool) -> None:
    """What the launch's answer or the listing says of a machine that is wanted."""
    values: dict[str, Any] = {"provider_id": provider_id}
    if active:
        values |= {"state": "active", "address": address}
    conn.execute(update(t.instances).where(_I.nonce == nonce, _I.state.in_(WANTED)).values(values))


def set_detail(conn: Connection, nonce: str, **detail: Any) -> None:
    known: Mapping[str, Any] = conn.execute(select(_I.detail).where(_I.nonce == nonce)).scalar_one_or_none() or {}
    conn.execute(update(t.instances).where(_I.nonce == nonce).values(detail={**known, **detail}))


def mark_unwanted(conn: Connection, nonce: str) -> None:
    """A machine that is to be terminated although its attempt goes on."""
    conn.execute(update(t.instances).where(_I.nonce == nonce, _I.state.in_(WANTED)).values(state="terminating"))


def mark_gone(conn: Connection, nonce: str, *, at: datetime, why: str) -> None:
    """The machine does not exist, by the provider's word; the first time counts."""
    set_detail(conn, nonce, end=why)
    conn.execute(update(t.instances).where(_I.nonce == nonce, _I.state != "gone").values(state="gone", gone_at=at))


def list_of_attempt(db: Database, attempt: str) -> list[Instance]:
    """Machines of an attempt in the order of their intents."""
    rows = db.mappings(select(t.instances).where(_I.attempt == attempt).order_by(_I.id))
    return [Instance(**row) for row in rows]


def list_by_name(db: Database, names: Collection[str]) -> dict[str, Instance]:
    """Rows of these names."""
    rows: dict[str, Instance] = {}
    with db.read() as conn:
        for some in slices(names):
            query = select(t.instances).where(_I.nonce.in_(some))
            rows |= {row["nonce"]: Instance(**row) for row in conn.execute(query).mappings()}
    return rows


def list_open_targets(db: Database) -> set[str]:
    """Targets with machines that are not gone."""
    return set(db.scalars(select(_I.target).where(_I.state != "gone").distinct()))


def list_bad_gpus(db: Database) -> dict[str, str]:
    """GPU serial → why its machine was returned as bad."""
    query = select(_I.detail).where(_I.state == "gone").order_by(_I.id.desc()).limit(_BAD_SEARCHED)
    bad: dict[str, str] = {}
    for detail in db.scalars(query):
        if isinstance(detail, Mapping) and detail.get("bad"):
            bad |= {str(gpu): str(detail["bad"]) for gpu in detail.get("gpus") or ()}
    return bad


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMachine:
    """A rented machine that is not gone, and the job it was rented for."""

    name: str  # the provider's id; before it is known the name in its tag
    kind: str | None
    region: str | None
    target: str
    state: str
    cents_per_hour: float | None
    launched_at: datetime
    job_id: str
    job_name: str
    project: str
    stage: str | None  # of the job; None: final
    stage_since: datetime | None
    stalled_at: datetime | None
    attempt_ended_at: datetime | None


def list_held_machines(conn: Connection, *, project: str | None = None) -> list[HeldMachine]:
    """Machines that were launched and that the provider has not confirmed as gone, of a project's jobs or of all."""
    a, j = t.attempts.c, t.jobs.c
    query = (
        select(_I.provider_id, _I.nonce, _I.kind, _I.region, _I.target, _I.state, _I.price_cents_per_hour,
               _I.launched_at, _I.created_at, j.id.label("job_id"), j.name.label("job_name"), j.project, j.stage,
               j.stage_since, j.stalled_at, a.ended_at)
        .join(t.attempts, a.id == _I.attempt)
        .join(t.jobs, j.id == a.job_id)
        .where(_I.state.in_(("launching", "active", "terminating", "lost")))
        .order_by(_I.id)
    )  # fmt: skip
    query = query.where(j.project == project) if project is not None else query
    return [
        HeldMachine(
            name=row.provider_id or row.nonce, kind=row.kind, region=row.region, target=row.target, state=row.state,
            cents_per_hour=row.price_cents_per_hour, launched_at=row.launched_at or row.created_at, job_id=row.job_id,
            job_name=row.job_name, project=row.project, stage=row.stage, stage_since=row.stage_since,
            stalled_at=row.stalled_at, attempt_ended_at=row.ended_at,
        )
        for row in conn.execute(query)
    ]  # fmt: skip
