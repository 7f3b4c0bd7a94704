"""What the rows say is still held by jobs that are over. Empty, unless something went wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from trainmaster.store import tables as t
from trainmaster.store.database import Database

_GONE = ("gone",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """An attempt of a job that is over, and what it still holds."""

    attempt: str
    target: str
    handle: Mapping[str, Any]
    status: str  # of its job
    what: str


def list_held(db: Database) -> list[Held]:
    """Attempts that were placed and never given back, and machines that nobody has seen go."""
    a, j, i = t.attempts.c, t.jobs.c, t.instances.c
    over, placed = j.stage.is_(None), a.handle.is_not(None)
    both = t.attempts.join(t.jobs, j.id == a.job_id)
    columns = (a.id, j.target, a.handle, j.status)
    unreleased = select(*columns).select_from(both).where(over, placed, a.released_at.is_(None)).order_by(a.id)
    machines = (
        select(*columns, i.provider_id, i.nonce)
        .select_from(both.join(t.instances, i.attempt == a.id))
        .where(over, placed, i.state.not_in(_GONE))
        .order_by(a.id, i.id)
    )
    with db.read() as conn:
        held = [
            Held(attempt=row[0], target=row[1], handle=row[2], status=row[3], what="never given back")
            for row in conn.execute(unreleased)
        ]
        held += [
            Held(attempt=row[0], target=row[1], handle=row[2], status=row[3], what=f"machine {row[4] or row[5]}")
            for row in conn.execute(machines)
        ]
    return held
