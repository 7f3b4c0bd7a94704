"""What people are to be told, put beside the change that makes it true: both are committed, or neither."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, select
from sqlalchemy.dialects import postgresql, sqlite

from trainmaster.store import house as h


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
    """Put one piece of news in. False where the same key is there: it is told once, however often it is found out."""
    dialect = sqlite if conn.dialect.name == "sqlite" else postgresql
    row = dialect.insert(h.outbox).values(
        key=key, topic=topic, project=project, job_id=job_id, payload=dict(payload), at=at
    )
    return conn.execute(row.on_conflict_do_nothing().returning(h.outbox.c.id)).first() is not None


def is_known(conn: Connection, key: str) -> bool:
    """Whether this news was put in before: a look that finds it out again need not write."""
    return conn.execute(select(h.outbox.c.id).where(h.outbox.c.key == key)).first() is not None
