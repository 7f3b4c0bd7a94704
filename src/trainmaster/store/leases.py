"""Leases of jobs. A reconciler leases jobs in bulk and writes for a job only while the lease is its own.

A token is one life of one reconciler. Renewing is one statement for all its jobs, so a thousand quiet jobs cost one
write every ten seconds. An expired lease goes to the first reconciler that takes it; the old holder
finds its token gone and writes nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import ColumnElement, Connection, bindparam, func, or_, select, true, update

from trainmaster.core.plan import EVENTS_FILE
from trainmaster.core.states import Stage, TargetState
from trainmaster.store import tables as t
from trainmaster.store.capacity import after
from trainmaster.store.columns import fetch_at_once
from trainmaster.store.database import Database

LENGTH_S = 30.0  # a dead reconciler on another machine is noticed after this; one on this machine at once
_LONGEST_REST_S = 3600.0  # control rests a job for minutes at most
_JOBS = t.jobs.c


def clock(conn: Connection) -> datetime:
    """The time that leases are measured in: the server's, where machines with clocks of their own share it."""
    if conn.dialect.name == "sqlite":
        return datetime.now(UTC)
    now: datetime = conn.execute(select(func.clock_timestamp())).scalar_one()
    return now


def wanted(db: Database, token: str, *, dead: Collection[str] = (), begins: str | None = None) -> bool:
    """Whether an open job has no live lease; `begins` as in `take`."""
    with db.read() as conn:
        free = _free(clock(conn), dead) & _begun(begins) & (_JOBS.lease_token.is_distinct_from(token))
        return conn.execute(select(_JOBS.id).where(_JOBS.stage.is_not(None), free).limit(1)).first() is not None


def take(conn: Connection, token: str, *, owner: str, dead: Collection[str] = (), begins: str | None = None) -> None:
    """Renew what this token holds, and take every open job that is free. `dead` are tokens known to be gone.

    With `begins`, of the jobs that still wait in the queue only that one is taken.
    """
    now = clock(conn)
    mine = or_(_JOBS.lease_token == token, _free(now, dead) & _begun(begins))
    until = now + timedelta(seconds=LENGTH_S)
    conn.execute(
        update(t.jobs)
        .where(_JOBS.stage.is_not(None), mine)
        .values(lease_token=token, lease_owner=owner[:255], lease_until=until)
    )


def drop(conn: Connection, token: str) -> None:
    """Give back everything, so that another can go on at once."""
    free = {"lease_token": None, "lease_owner": None, "lease_until": None}
    conn.execute(update(t.jobs).where(_JOBS.lease_token == token).values(free))


def holds(conn: Connection, job_id: str, token: str) -> bool:
    """Whether this token may write for the job, for as long as this transaction lasts."""
    return conn.execute(_HOLDS, {"job": job_id, "token": token}).first() is not None


_HOLDS = select(_JOBS.id).where(_JOBS.id == bindparam("job"), _JOBS.lease_token == bindparam("token")).with_for_update()


def list_due(db: Database, token: str) -> list[str]:
    """The open jobs that this token holds, that are not resting and wait for no other job, oldest first."""
    query = select(_JOBS.created_at, _JOBS.id).where(_JOBS.stage.is_not(None), _JOBS.lease_token == token, rested())
    with db.read() as conn:
        rows = fetch_at_once(conn, query.where(or_(_JOBS.cancel_requested, ~after.held())))
    return [job_id for _, job_id in sorted(rows)]


def list_unwanted(db: Database, token: str) -> list[str]:
    """The jobs that this token holds, that are being started, and that a user or a cap wants to stop."""
    words = [Stage.PLACING.value, Stage.PROVISIONING.value, Stage.CONNECTING.value, Stage.STAGING.value]
    starting = _JOBS.stage.is_not(None) & _JOBS.stage.in_(words)
    a = t.attempts.c
    last = (a.job_id == _JOBS.id) & (a.number == _JOBS.attempts)
    with db.read() as conn:
        query = (
            select(_JOBS.id)
            .outerjoin(t.attempts, last)
            .where(starting, _JOBS.lease_token == token, or_(_JOBS.cancel_requested, a.stop_reason.is_not(None)))
        )
        return list(conn.execute(query).scalars())


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRow:
    """A job whose attempt is on its node, the attempt, and how far its events are kept."""

    job_id: str
    stage: Stage
    attempt: str
    report: TargetState | None
    message: str
    heard_at: datetime | None
    offset: int
    inside: bool
    base: int = 0
    tail: bytes | None = None
    kept: int = 0


def list_running(db: Database, token: str) -> list[RunningRow]:
    """Jobs of this token that are checked or run, without a stop request and without a failed last tick."""
    j, a, s = t.jobs.c, t.attempts.c, t.streams.c
    query = (
        select(j.id, j.stage, a.id, a.report, j.message, j.heard_at, s.offset, s.inside, s.base, s.tail, s.kept)
        .select_from(t.jobs)
        .join(t.attempts, (a.job_id == j.id) & (a.number == j.attempts))
        .outerjoin(t.streams, (s.attempt == a.id) & (s.stream == EVENTS_FILE))
        .where(
            j.stage.is_not(None),  # said first: SQLite then walks the open jobs alone
            j.stage.in_((Stage.CHECKING.value, Stage.RUNNING.value)),
            j.lease_token == token,
            j.cancel_requested.is_(False),
            j.stalled_at.is_(None),
            j.tries == 0,
            rested(),
            a.stop_reason.is_(None),
            a.ended_at.is_(None),
        )
    )
    with db.read() as conn:
        rows = fetch_at_once(conn, query)
    return [
        RunningRow(
            job_id=job, stage=Stage(stage), attempt=attempt, message=message, heard_at=heard,
            report=TargetState(report) if report is not None else None, offset=offset or 0, inside=bool(inside),
            base=base or 0, tail=bytes.fromhex(tail) if tail is not None else None, kept=kept or 0,
        )
        for job, stage, attempt, report, message, heard, offset, inside, base, tail, kept in rows
    ]  # fmt: skip


def others(db: Database, token: str) -> dict[str, str]:
    """Token and owner of every other reconciler that holds an open job."""
    query = select(_JOBS.lease_token, _JOBS.lease_owner).where(
        _JOBS.stage.is_not(None), _JOBS.lease_token.is_not(None), _JOBS.lease_token != token
    )
    return {row.lease_token: row.lease_owner or "" for row in db.rows(query.distinct())}


def count_held(conn: Connection) -> int:
    """Open jobs with a live lease."""
    held = (_JOBS.stage.is_not(None), _JOBS.lease_until >= clock(conn))
    return conn.execute(select(func.count()).select_from(t.jobs).where(*held)).scalar_one()


def is_held_elsewhere(db: Database, host: str) -> bool:
    """Whether a reconciler on another machine than `host` holds an open job now."""
    with db.read() as conn:
        query = select(_JOBS.lease_owner).where(_JOBS.stage.is_not(None), _JOBS.lease_until >= clock(conn))
        owners = conn.execute(query.distinct()).scalars()
        return any(owner is not None and owner.partition(" ")[0] != host for owner in owners)


def _begun(begins: str | None) -> ColumnElement[bool]:
    if begins is None:
        return true()
    return or_(_JOBS.stage != Stage.QUEUED.value, _JOBS.id == begins, _JOBS.cancel_requested)


def _free(now: datetime, dead: Collection[str]) -> ColumnElement[bool]:
    # No lease reaches that far: the clock was set back, and its holder renews by the new time if it lives.
    past = _JOBS.lease_until > now + timedelta(seconds=2 * LENGTH_S)
    return or_(_JOBS.lease_token.is_(None), _JOBS.lease_until < now, past, _JOBS.lease_token.in_(list(dead)))


def rested() -> ColumnElement[bool]:
    """Whether the rest of a job is over, or reaches so far that the clock must have been set back since."""
    now, until = datetime.now(UTC), _JOBS.rest_until
    return or_(until.is_(None), until <= now, until > now + timedelta(seconds=_LONGEST_REST_S))
