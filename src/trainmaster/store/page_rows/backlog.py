"""Database health for /readyz and /metrics: reachable, schema version, queue depths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import func, select, text
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from trainmaster.core.errors import StoreError
from trainmaster.core.plan import EVENTS_FILE
from trainmaster.core.states import Status
from trainmaster.store import leases
from trainmaster.store import tables as t
from trainmaster.store.capacity import queue
from trainmaster.store.database import Database
from trainmaster.store.migrate import revisions

# What a query raises when the database is away, full, read-only or busy for too long: later may be better.
GONE: tuple[type[Exception], ...] = (OperationalError, InterfaceError, InternalError, PoolTimeout, StoreError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Queue depths and event lag."""

    jobs: Mapping[str, int]  # of each status
    event_lags_s: tuple[float, ...]  # of each running attempt: from when its last event was written until it was kept
    news_waiting: int  # notifications not yet dispatched
    deliveries_waiting: int  # messages on their way, tries that failed among them
    instances: Mapping[str, int]  # of each state
    active_orchestrators: int = 0  # open jobs that a live reconciler holds
    jobs_waiting: int = 0  # in the queue, without those that wait for other jobs to end
    longest_wait_s: float = 0.0  # of these


def find_fault(db: Database) -> str | None:
    """Reason why the database cannot be used; None if it can."""
    try:
        with db.read() as conn:
            revision = conn.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()
            postgresql = conn.dialect.name == "postgresql"
            if postgresql and conn.execute(text("SHOW transaction_read_only")).scalar_one() == "on":
                return "the database is read-only: a standby, or default_transaction_read_only is on"
    except StoreError as error:
        return str(error)
    except GONE as error:
        return f"the database cannot be asked: {type(error).__name__}"
    except Exception as error:  # a table that is not there has another error on each database
        return f"the database has no schema: {type(error).__name__}"
    if revision != revisions()[-1]:
        return f"the schema is {revision}, and this server is made for {revisions()[-1]}"
    return None


def read_backlog(db: Database) -> Backlog:
    """All figures, in a handful of queries."""
    e, s, later = t.events, t.streams.c, t.events.alias("later")
    last = (
        select(func.max(later.c.offset))
        .where(later.c.attempt == s.attempt, later.c.stream == EVENTS_FILE)
        .scalar_subquery()
    )
    lags = (
        select(e.c.ts, s.heard_at)
        .select_from(t.jobs)
        .join(t.attempts, (t.attempts.c.job_id == t.jobs.c.id) & (t.attempts.c.number == t.jobs.c.attempts))
        .join(t.streams, (s.attempt == t.attempts.c.id) & (s.stream == EVENTS_FILE))
        .join(e, (e.c.attempt == s.attempt) & (e.c.stream == s.stream) & (e.c.offset == last))
        .where(t.jobs.c.stage.is_not(None), e.c.ts.is_not(None), s.heard_at.is_not(None))
    )
    waiting = select(func.count()).select_from(t.outbox).where(t.outbox.c.spread_at.is_(None))
    sending = select(func.count()).select_from(t.deliveries).where(t.deliveries.c.next_at.is_not(None))
    with db.read() as conn:
        queued, oldest = conn.execute(queue.count_waiting()).one()
        statuses = select(t.jobs.c.status, func.count()).group_by(t.jobs.c.status)
        jobs: dict[str, int] = {row[0]: row[1] for row in conn.execute(statuses)}
        states = select(t.instances.c.state, func.count()).group_by(t.instances.c.state)
        return Backlog(
            jobs={word.value: jobs.get(word.value, 0) for word in Status},
            event_lags_s=tuple(max(0.0, (heard - ts).total_seconds()) for ts, heard in conn.execute(lags)),
            news_waiting=conn.execute(waiting).scalar_one(),
            deliveries_waiting=conn.execute(sending).scalar_one(),
            instances={row[0]: row[1] for row in conn.execute(states)},
            active_orchestrators=leases.count_held(conn),
            jobs_waiting=queued,
            longest_wait_s=max(0.0, (datetime.now(UTC) - oldest).total_seconds()) if oldest is not None else 0.0,
        )
