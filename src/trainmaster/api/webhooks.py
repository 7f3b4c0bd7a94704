"""Webhooks: subscribers of job notifications."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """A webhook: its URL and the topics it subscribes to."""

    id: str
    project: str | None  # None: every project
    url: str
    topics: tuple[str, ...]  # none: all
    created_at: datetime
    enabled: bool

    def wants(self, topic: str, project: str) -> bool:
        return self.enabled and self.project in (None, project) and (not self.topics or topic in self.topics)


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhooks:
    webhooks: tuple[Webhook, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWebhook:
    """A webhook that was just created. `signing_key` is shown only here."""

    id: str
    project: str | None
    url: str
    topics: tuple[str, ...]
    created_at: datetime
    enabled: bool
    signing_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One notification to one channel. `state`: delivered, waiting (to be sent or retried at `next_at`) or failed."""

    id: int
    at: datetime  # when the notification was created
    topic: str
    job_id: str | None
    channel: str  # webhook:<id>, or the name of a channel in notify.yaml
    state: Literal["delivered", "waiting", "failed"]
    tries: int
    next_at: datetime | None
    done_at: datetime | None
    status: int | None  # of the HTTP answer
    error: str | None
    took_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliveries:
    deliveries: tuple[Delivery, ...]
