"""Webhooks. A row holds no secret: the signing key is derived from the home folder's key file."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Connection, delete, insert, select, update

from trainmaster.api.webhooks import Webhook
from trainmaster.store import tables as t

_HOOKS = t.webhooks.c


def insert_webhook(
    conn: Connection, webhook_id: str, *, url: str, project: str | None, topics: Sequence[str], at: datetime
) -> None:
    """A new address. The caller has asked control.notify.check_url whether it may be one."""
    row = {"id": webhook_id, "project": project, "url": url, "topics": list(topics), "created_at": at, "enabled": True}
    conn.execute(insert(t.webhooks).values(row))


def enable_webhook(conn: Connection, webhook_id: str, *, enabled: bool) -> bool:
    """Switch an address on or off; False if there is none."""
    return conn.execute(update(t.webhooks).where(_HOOKS.id == webhook_id).values(enabled=enabled)).rowcount == 1


def remove_webhook(conn: Connection, webhook_id: str) -> bool:
    """Forget an address; False if there is none. What is on its way to it is given up by the next dispatcher."""
    return conn.execute(delete(t.webhooks).where(_HOOKS.id == webhook_id)).rowcount == 1


def list_webhooks(conn: Connection, *, project: str | None = None) -> list[Webhook]:
    """Every address, oldest first; of a project: its own alone."""
    query = select(t.webhooks).order_by(_HOOKS.created_at, _HOOKS.id)
    if project is not None:
        query = query.where(_HOOKS.project == project)
    return [Webhook(**{**row, "topics": tuple(row["topics"])}) for row in conn.execute(query).mappings()]


def find_webhook(conn: Connection, webhook_id: str) -> Webhook | None:
    row = conn.execute(select(t.webhooks).where(_HOOKS.id == webhook_id)).mappings().first()
    return Webhook(**{**row, "topics": tuple(row["topics"])}) if row is not None else None
