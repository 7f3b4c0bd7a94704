"""Notifications and their deliveries to each channel. A delivery is claimed by compare-and-set, so that two
dispatchers do not send it at the same time; a claim without a result expires, and the delivery is sent again under its
id.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, or_, select, update

from trainmaster.store import tables as t
from trainmaster.store.columns import upsert
from trainmaster.store.database import Database

_NEWS, _WAYS = t.outbox.c, t.deliveries.c
_ERROR_LIMIT = 500  # characters
_NEVER = timedelta(hours=2)  # after now: no delivery rests that long, so the clock was set back


@dataclass(frozen=True, slots=True, kw_only=True)
class NewsRow:
    """A notification."""

    id: int
    key: str
    at: datetime
    topic: str
    project: str
    job_id: str | None
    payload: Mapping[str, Any]
    spread_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryRow:
    """Delivery of one notification to one channel. `done_at` None and `next_at` None: it was given up."""

    id: int
    outbox_id: int
    channel: str
    tries: int
    next_at: datetime | None
    done_at: datetime | None
    status: int | None
    error: str | None
    took_s: float | None
    news: NewsRow


def insert_news(
    conn: Connection,
    *,
    key: str,
    topic: str,
    project: str,
    job_id: str | None,
    payload: Mapping[str, Any],
    at: datetime,
) -> bool:
    """Insert a notification. False if its key exists: each is sent once, however often it is found."""
    row = {"key": key, "topic": topic, "project": project, "job_id": job_id, "payload": dict(payload), "at": at}
    change = upsert(conn.dialect.name, t.outbox, ("key",)).returning(t.outbox.c.id)
    return conn.execute(change, row).first() is not None


def is_known(conn: Connection, key: str) -> bool:
    """Whether a notification with this key exists."""
    return conn.execute(select(t.outbox.c.id).where(t.outbox.c.key == key)).first() is not None


def list_unspread(conn: Connection, *, limit: int = 100) -> list[NewsRow]:
    """News that has no deliveries yet, oldest first; held until this transaction ends, so that two do not spread it."""
    query = select(t.outbox).where(_NEWS.spread_at.is_(None)).order_by(_NEWS.id).limit(limit)
    rows = conn.execute(query.with_for_update(skip_locked=True)).mappings()
    return [NewsRow(**row) for row in rows]


def has_unspread(db: Database) -> bool:
    return db.first(select(_NEWS.id).where(_NEWS.spread_at.is_(None)).limit(1)) is not None


def spread(conn: Connection, news: NewsRow, channels: Collection[str], *, at: datetime) -> None:
    """Send a piece of news on its way to each channel."""
    change = upsert(conn.dialect.name, t.deliveries, ("outbox_id", "channel"))
    if rows := [{"outbox_id": news.id, "channel": channel, "tries": 0, "next_at": at} for channel in channels]:
        conn.execute(change, rows)
    conn.execute(update(t.outbox).where(_NEWS.id == news.id).values(spread_at=at))


def list_due(db: Database, channel: str, *, now: datetime, limit: int) -> list[DeliveryRow]:
    """What a channel is to be sent now, in the order in which it came due."""
    return _list(db, and_(_WAYS.channel == channel, _is_due(now)), order=_WAYS.next_at, limit=limit)


def due_channels(db: Database, *, now: datetime) -> list[str]:
    """The channels that something is due for."""
    query = select(_WAYS.channel).where(_is_due(now)).distinct()
    return db.scalars(query)


def _is_due(now: datetime) -> ColumnElement[bool]:
    return or_(_WAYS.next_at <= now, _WAYS.next_at > now + _NEVER)


def claim(conn: Connection, delivery: DeliveryRow, *, until: datetime) -> bool:
    """Take a delivery that is due, for as long as sending it may last; False if another took it."""
    row = update(t.deliveries).where(_WAYS.id == delivery.id, _WAYS.next_at == delivery.next_at)
    return conn.execute(row.values(next_at=until, tries=_WAYS.tries + 1)).rowcount == 1


def mark_done(conn: Connection, delivery_id: int, *, at: datetime, status: int | None, took_s: float) -> None:
    """Mark a delivery as done, also where the claim has passed to another dispatcher."""
    done = {"next_at": None, "done_at": at, "status": status, "error": None, "took_s": took_s}
    conn.execute(update(t.deliveries).where(_WAYS.id == delivery_id, _WAYS.done_at.is_(None)).values(done))


def mark_failed(
    conn: Connection,
    delivery_id: int,
    *,
    claimed_until: datetime,
    next_at: datetime | None,
    status: int | None,
    error: str,
    took_s: float | None,
) -> None:
    """Mark a delivery as failed: retry at `next_at`, or give up. No effect if the claim has expired."""
    failed = {"next_at": next_at, "status": status, "error": _clean(error), "took_s": took_s}
    mine = (_WAYS.id == delivery_id, _WAYS.next_at == claimed_until, _WAYS.done_at.is_(None))
    conn.execute(update(t.deliveries).where(*mine).values(failed))


def give_up(conn: Connection, channel: str, error: str, *, before: datetime) -> int:
    """Give up what waits for a channel and is older than this; how many that were."""
    old = select(_NEWS.id).where(_NEWS.at < before)
    waiting = (_WAYS.channel == channel, _WAYS.next_at.is_not(None), _WAYS.outbox_id.in_(old))
    row = update(t.deliveries).where(*waiting)
    return conn.execute(row.values(next_at=None, error=_clean(error))).rowcount


def list_deliveries(
    db: Database,
    *,
    channel: str | None = None,
    job_id: str | None = None,
    project: str | None = None,
    failed: bool = False,
    limit: int = 50,
) -> list[DeliveryRow]:
    """Deliveries, newest first; `failed`: those that were given up or did not arrive yet."""
    exact = ((_WAYS.channel, channel), (_NEWS.job_id, job_id), (_NEWS.project, project))
    wanted = [column == value for column, value in exact if value is not None]
    if failed:
        wanted.append(and_(_WAYS.done_at.is_(None), or_(_WAYS.next_at.is_(None), _WAYS.tries > 0)))
    return _list(db, and_(True, *wanted), order=_WAYS.id.desc(), limit=limit)


def _list(db: Database, wanted: ColumnElement[bool], *, order: Any, limit: int) -> list[DeliveryRow]:
    query = select(t.deliveries, t.outbox).join(t.outbox, _NEWS.id == _WAYS.outbox_id).where(wanted)
    delivery_columns, news_columns = [column.name for column in t.deliveries.c], [column.name for column in t.outbox.c]
    rows = db.rows(query.order_by(order).limit(limit))
    return [
        DeliveryRow(
            **dict(zip(delivery_columns, row, strict=False)),
            news=NewsRow(**dict(zip(news_columns, row[len(delivery_columns) :], strict=True))),
        )
        for row in rows
    ]


def _clean(text: str) -> str:
    return text[:_ERROR_LIMIT].replace("\x00", "\ufffd")
