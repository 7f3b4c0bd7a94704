"""Webhooks: subscribers of job notifications."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """A webhook: its URL and the topics it subscribes to."""

    id: str
    project: str | None  # None: every project
    url: str
    topics: tuple[str, ...]  # none: all
    created_at: datetime
    enabled: bool


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
