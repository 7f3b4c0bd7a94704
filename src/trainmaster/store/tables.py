"""The tables. A change here needs a migration beside it; a test compares the two.

jobs ─┬─ attempts ─┬─ streams    how far each stream of an attempt has been read
      │            └─ events     one row per line, named by (attempt, stream, offset): never twice
      └─ transitions             every move of a job, written with the move; only ever added to
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Dialect,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeDecorator


class UtcTime(TypeDecorator[datetime]):
    """An aware time, kept as UTC. SQLite has no zones: without this a local time would be kept as if it were UTC."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        if value is None:
            return None
        assert value.tzinfo is not None, "a time without its zone has no place in the database"
        return value.astimezone(UTC)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        if value is None:
            return None
        found: datetime = value
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)


# Names are given by rule, so that a later migration can speak of a constraint on both databases.
metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)


def _json() -> JSON:
    return JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def _big() -> BigInteger:
    return BigInteger().with_variant(Integer(), "sqlite")


jobs = Table(
    "jobs",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("name", String(63), nullable=False),
    Column("project", String(63), nullable=False),
    Column("target", Text, nullable=False),
    Column("status", String(16), nullable=False),
    Column("stage", String(16)),  # NULL: final
    Column("reason", String(32)),
    Column("message", Text, nullable=False),
    Column("spec", _json(), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("cancel_requested", Boolean, nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("started_at", UtcTime),
    Column("ended_at", UtcTime),
    # The listing is newest first, whole or filtered; each of these gives one page of it without a sort.
    Index(None, "created_at", "id"),
    Index(None, "status", "created_at", "id"),
    Index(None, "project", "created_at", "id"),
    # What the reconciler asks for at every tick: a handful of rows, however many jobs are final.
    Index(
        "ix_jobs_open", "created_at", sqlite_where=text("stage IS NOT NULL"), postgresql_where=text("stage IS NOT NULL")
    ),
)

attempts = Table(
    "attempts",
    metadata,
    Column("id", String(64), primary_key=True),  # "<job uuid>.<number>"
    Column("job_id", String(36), ForeignKey("jobs.id"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("handle", _json()),
    Column("report", String(16)),
    Column("reason", String(32)),
    Column("message", Text, nullable=False),
    Column("exit", _json()),
    Column("created_at", UtcTime, nullable=False),
    Column("started_at", UtcTime),
    Column("ended_at", UtcTime),
    UniqueConstraint("job_id", "number"),
)

streams = Table(
    "streams",
    metadata,
    Column("attempt", String(64), ForeignKey("attempts.id"), primary_key=True),
    Column("stream", String(255), primary_key=True),
    Column("offset", _big(), nullable=False),  # every byte before it is in `events`, none after it
    Column("inside", Boolean, nullable=False),  # the offset lies inside a line too long to be kept whole
)

events = Table(
    "events",
    metadata,
    Column("attempt", String(64), ForeignKey("attempts.id"), primary_key=True),
    Column("stream", String(255), primary_key=True),
    Column("offset", _big(), primary_key=True, autoincrement=False),
    Column("length", _big(), nullable=False),
    Column("ts", UtcTime),
    Column("seq", _big()),
    Column("phase", Text),  # NULL: a line that is not an event, kept as `text`
    Column("event", Text),
    Column("iteration", _big()),
    Column("epoch", _big()),
    Column("data", _json()),
    Column("extra", _json()),
    Column("fault", Text),
    Column("text", Text),
    Index(None, "attempt", "stream", "phase", "offset"),
    Index(
        "ix_events_faults", "attempt", "offset",
        sqlite_where=text("fault IS NOT NULL"), postgresql_where=text("fault IS NOT NULL"),
    ),
    # Not WITHOUT ROWID, although the key would fit: SQLite then walks the key for every query of an attempt and leaves
    # both indexes aside, so that one rare phase costs a look at every event (measured: 80 ms against 1 at 100,000).
)  # fmt: skip

transitions = Table(
    "transitions",
    metadata,
    Column("id", _big(), primary_key=True),
    Column("job_id", String(36), ForeignKey("jobs.id"), nullable=False),
    Column("at", UtcTime, nullable=False),
    Column("stage_from", String(16)),  # NULL: the job was made
    Column("stage_to", String(16)),  # NULL: the job is final
    Column("status", String(16), nullable=False),
    Column("reason", String(32)),
    Column("message", Text, nullable=False),
    Index(None, "job_id", "id"),
)
