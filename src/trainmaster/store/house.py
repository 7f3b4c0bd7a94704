"""Who may do what, what it may cost, and who is told. No row holds a secret: tokens are hashes, and a webhook's signing
key is derived from the home folder's key file when it is needed.
"""

from __future__ import annotations

from sqlalchemy import Boolean, Column, Float, ForeignKey, Index, Integer, String, Table, Text, UniqueConstraint, text

from trainmaster.store.columns import UtcTime, big, json_column, metadata

tokens = Table(
    "tokens",
    metadata,
    Column("id", big(), primary_key=True),
    Column("name", String(63), nullable=False, unique=True),
    Column("hash", String(64), nullable=False, unique=True),  # SHA-256; the token has 256 random bits, so no salt
    Column("role", String(16), nullable=False),  # admin, user, viewer
    Column("project", String(63)),  # NULL: every project
    Column("created_at", UtcTime, nullable=False),
    Column("used_at", UtcTime),
    Column("revoked_at", UtcTime),
)

audit = Table(
    "audit",
    metadata,
    Column("id", big(), primary_key=True),
    Column("at", UtcTime, nullable=False),
    Column("who", String(63), nullable=False),  # a token's name, `loopback`, or `control`
    Column("action", String(64), nullable=False),  # job.submit, job.cancel, token.create, budget.set, …
    Column("subject", Text, nullable=False),
    Column("detail", json_column()),
    Index(None, "subject", "id"),
)

budgets = Table(
    "budgets",
    metadata,
    Column("id", big(), primary_key=True),
    Column("project", String(63), nullable=False),
    Column("period", String(8), nullable=False),  # total, month
    Column("cap_cents", big(), nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("warned_at", UtcTime),
    UniqueConstraint("project", "period"),
)

webhooks = Table(
    "webhooks",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("project", String(63)),  # NULL: every project
    Column("url", Text, nullable=False),  # without credentials
    Column("topics", json_column(), nullable=False),  # empty list: all
    Column("created_at", UtcTime, nullable=False),
    Column("enabled", Boolean, nullable=False),
)

outbox = Table(
    "outbox",
    metadata,
    Column("id", big(), primary_key=True),
    Column("key", String(255), nullable=False, unique=True),  # what it tells of: the same news is never put in twice
    Column("at", UtcTime, nullable=False),
    Column("topic", String(32), nullable=False),  # job.completed, job.failed, job.stalled, budget.exceeded, …
    Column("project", String(63), nullable=False),
    Column("job_id", String(36), ForeignKey("jobs.id")),
    Column("payload", json_column(), nullable=False),
    Column("spread_at", UtcTime),  # when its deliveries were made; NULL: not yet
    Index("ix_outbox_new", "id", sqlite_where=text("spread_at IS NULL"), postgresql_where=text("spread_at IS NULL")),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("id", big(), primary_key=True),
    Column("outbox_id", big(), ForeignKey("outbox.id"), nullable=False),
    Column("channel", Text, nullable=False),  # webhook:<id>, or the name of a channel of the server's config
    Column("tries", Integer, nullable=False),
    Column("next_at", UtcTime),  # NULL: done, or given up
    Column("done_at", UtcTime),
    Column("status", Integer),
    Column("error", Text),
    Column("took_s", Float),
    UniqueConstraint("outbox_id", "channel"),
    Index("ix_deliveries_due", "channel", "next_at", sqlite_where=text("next_at IS NOT NULL"),
          postgresql_where=text("next_at IS NOT NULL")),
)  # fmt: skip
