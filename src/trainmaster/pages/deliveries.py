"""Deliveries of notifications: to one webhook, or of one job."""

from __future__ import annotations

from typing import Literal

from trainmaster.api.codec import fill
from trainmaster.api.webhooks import Deliveries, Delivery
from trainmaster.store.database import Database
from trainmaster.store.outbox import DeliveryRow, list_deliveries


def read(
    db: Database,
    *,
    webhook: str | None = None,
    job: str | None = None,
    project: str | None = None,
    failed: bool = False,
    limit: int = 50,
) -> Deliveries:
    """Deliveries, newest first; `failed`: only those that failed or wait for a retry."""
    channel = f"webhook:{webhook}" if webhook is not None else None
    rows = list_deliveries(db, channel=channel, job_id=job, project=project, failed=failed, limit=limit)
    return Deliveries(deliveries=tuple(_delivery(row) for row in rows))


def _delivery(row: DeliveryRow) -> Delivery:
    state: Literal["delivered", "waiting", "failed"]
    state = "delivered" if row.done_at is not None else "waiting" if row.next_at is not None else "failed"
    news = row.news
    return fill(Delivery, row, at=news.at, topic=news.topic, job_id=news.job_id, state=state)
