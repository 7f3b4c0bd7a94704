"""Jobs, attempts, streams, events, transitions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None

# Written out, not taken from tables.py: a migration must go on meaning what it meant when tables.py has moved on.
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON().with_variant(JSONB(), "postgresql")
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    _create_jobs()
    _create_attempts()
    _create_events()
    _create_transitions()


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("project", sa.String(63), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("stage", sa.String(16)),
        sa.Column("reason", sa.String(32)),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("spec", JSON, nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("started_at", TIME),
        sa.Column("ended_at", TIME),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
    )
    op.create_index("ix_jobs_created_at_id", "jobs", ["created_at", "id"])
    op.create_index("ix_jobs_status_created_at_id", "jobs", ["status", "created_at", "id"])
    op.create_index("ix_jobs_project_created_at_id", "jobs", ["project", "created_at", "id"])
    is_open = sa.text("stage IS NOT NULL")
    op.create_index("ix_jobs_open", "jobs", ["created_at"], sqlite_where=is_open, postgresql_where=is_open)


def _create_attempts() -> None:
    op.create_table(
        "attempts",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(36), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("handle", JSON),
        sa.Column("report", sa.String(16)),
        sa.Column("reason", sa.String(32)),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("exit", JSON),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("started_at", TIME),
        sa.Column("ended_at", TIME),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_attempts_job_id"),
        sa.PrimaryKeyConstraint("id", name="pk_attempts"),
        sa.UniqueConstraint("job_id", "number", name="uq_attempts_job_id_number"),
    )

    op.create_table(
        "streams",
        sa.Column("attempt", sa.String(64), nullable=False),
        sa.Column("stream", sa.String(255), nullable=False),
        sa.Column("offset", BIG, nullable=False),
        sa.Column("inside", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["attempt"], ["attempts.id"], name="fk_streams_attempt"),
        sa.PrimaryKeyConstraint("attempt", "stream", name="pk_streams"),
    )


def _create_events() -> None:
    op.create_table(
        "events",
        sa.Column("attempt", sa.String(64), nullable=False),
        sa.Column("stream", sa.String(255), nullable=False),
        sa.Column("offset", BIG, autoincrement=False, nullable=False),
        sa.Column("length", BIG, nullable=False),
        sa.Column("ts", TIME),
        sa.Column("seq", BIG),
        sa.Column("phase", sa.Text()),
        sa.Column("event", sa.Text()),
        sa.Column("iteration", BIG),
        sa.Column("epoch", BIG),
        sa.Column("data", JSON),
        sa.Column("extra", JSON),
        sa.Column("fault", sa.Text()),
        sa.Column("text", sa.Text()),
        sa.ForeignKeyConstraint(["attempt"], ["attempts.id"], name="fk_events_attempt"),
        sa.PrimaryKeyConstraint("attempt", "stream", "offset", name="pk_events"),
    )
    op.create_index("ix_events_attempt_stream_phase_offset", "events", ["attempt", "stream", "phase", "offset"])
    faulty = sa.text("fault IS NOT NULL")
    op.create_index("ix_events_faults", "events", ["attempt", "offset"], sqlite_where=faulty, postgresql_where=faulty)


def _create_transitions() -> None:
    op.create_table(
        "transitions",
        sa.Column("id", BIG, nullable=False),
        sa.Column("job_id", sa.String(36), nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.Column("stage_from", sa.String(16)),
        sa.Column("stage_to", sa.String(16)),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("reason", sa.String(32)),
        sa.Column("message", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_transitions_job_id"),
        sa.PrimaryKeyConstraint("id", name="pk_transitions"),
    )
    op.create_index("ix_transitions_job_id_id", "transitions", ["job_id", "id"])


def downgrade() -> None:
    for table in ("transitions", "events", "streams", "attempts", "jobs"):
        op.drop_table(table)
