"""The tables of a job's way. A change here needs a migration beside it; a test compares the two.

jobs ─┬─ attempts ─┬─ streams    how far each stream of an attempt has been read
      │            ├─ events     one row per line, named by (attempt, stream, offset): never twice
      │            └─ instances  what was rented for it: the intent first, gone only when the cloud says so
      └─ transitions             every move of a job, written with the move; only ever added to

What the lines say of the training is in records.py; who may do what, money and messages are in house.py.
"""

from __future__ import annotations

from sqlalchemy import (
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from trainmaster.store.columns import UtcTime, big, json_column, metadata

__all__ = ["UtcTime", "attempts", "events", "instances", "jobs", "metadata", "streams", "transitions"]


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
    Column("spec", json_column(), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("cancel_requested", Boolean, nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("started_at", UtcTime),
    Column("ended_at", UtcTime),
    # What PROJECT and GROUP_ITERATION events say: when the project began there, how long it took, with which config.
    Column("project_started_at", UtcTime),
    Column("time_taken", Float),
    Column("training_config", json_column()),
    Column("heard_at", UtcTime),  # when the last new event was taken in; a job that is silent for long has stalled
    Column("stalled_at", UtcTime),  # since when it is known to have stalled; NULL while it is heard of
    Column("rest_until", UtcTime),  # not to be worked on before: the backoff between tries, kept over a restart
    Column("tries", Integer, nullable=False, server_default=text("0")),  # of the present stage that failed in a row
    Column("stage_since", UtcTime),  # when the present stage began, for its deadline
    Column("cancel_at", UtcTime),  # when it was asked to stop, for the deadline of that
    # Who works on it now. Every write of a worker holds only while this token is still its own.
    Column("lease_token", String(36)),
    Column("lease_owner", String(255)),
    Column("lease_until", UtcTime),
    Column("submit_key", String(64)),  # SHA-256 of the idempotency key with which it was submitted
    Column(
        "submit_hash", String(64)
    ),  # SHA-256 of what was submitted with it: the same key with another spec is refused
    Column("submitted_by", String(63)),  # name of the token; NULL over loopback
    Index("uq_jobs_project_submit_key", "project", "submit_key", unique=True),
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
    Column("handle", json_column()),
    Column("report", String(16)),
    Column("reason", String(32)),
    Column("message", Text, nullable=False),
    Column("exit", json_column()),
    Column("created_at", UtcTime, nullable=False),
    Column("started_at", UtcTime),
    Column("ended_at", UtcTime),
    Column("price_cents_per_hour", Float),  # of the whole attempt, as it was when it was placed; NULL: not known
    Column("released_at", UtcTime),  # when everything it held was given back: until then it costs
    # Why the control plane wants it to stop (a limit, a budget, a stall), and since when; a user's wish is the job's.
    Column("stop_reason", String(32)),
    Column("stop_at", UtcTime),
    UniqueConstraint("job_id", "number"),
)

streams = Table(
    "streams",
    metadata,
    Column("attempt", String(64), ForeignKey("attempts.id"), primary_key=True),
    Column("stream", String(255), primary_key=True),
    Column("offset", big(), nullable=False),  # every byte before it is in `events`, none after it
    Column("heard_at", UtcTime),  # when it last grew
    Column("inside", Boolean, nullable=False),  # the offset lies inside a line too long to be kept whole
)

events = Table(
    "events",
    metadata,
    Column("attempt", String(64), ForeignKey("attempts.id"), primary_key=True),
    Column("stream", String(255), primary_key=True),
    Column("offset", big(), primary_key=True, autoincrement=False),
    Column("length", big(), nullable=False),
    Column("ts", UtcTime),
    Column("seq", big()),
    Column("phase", Text),  # NULL: a line that is not an event, kept as `text`
    Column("event", Text),
    Column("iteration", big()),
    Column("epoch", big()),
    Column("data", json_column()),
    Column("extra", json_column()),
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
    Column("id", big(), primary_key=True),
    Column("job_id", String(36), ForeignKey("jobs.id"), nullable=False),
    Column("at", UtcTime, nullable=False),
    Column("stage_from", String(16)),  # NULL: the job was made
    Column("stage_to", String(16)),  # NULL: the job is final
    Column("status", String(16), nullable=False),
    Column("reason", String(32)),
    Column("message", Text, nullable=False),
    Index(None, "job_id", "id"),
)

instances = Table(
    "instances",
    metadata,
    Column("id", big(), primary_key=True),
    Column("attempt", String(64), ForeignKey("attempts.id"), nullable=False),
    Column("target", Text, nullable=False),
    Column("nonce", String(64), nullable=False, unique=True),  # its tag in the cloud, committed before it is launched
    Column("provider_id", String(128)),  # NULL: not launched yet, or nobody knows
    Column("kind", String(128)),
    Column("region", String(64)),
    Column("state", String(16), nullable=False),  # intended, launching, active, terminating, gone, lost
    Column("price_cents_per_hour", Float),
    Column("address", Text),
    Column("created_at", UtcTime, nullable=False),
    Column("launched_at", UtcTime),
    Column("gone_at", UtcTime),  # when the cloud said so
    Column("detail", json_column()),
    Index(None, "attempt"),
    Index(None, "state", "id"),
)
