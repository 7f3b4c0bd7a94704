"""Schedules of sets: the times at which their trials begin again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0017"
down_revision = "0016"

JSON = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "schedules",
        sa.Column("set_id", sa.String(36), nullable=False),
        sa.Column("schedule", JSON, nullable=False),
        sa.Column("trials", JSON, nullable=False),
        sa.Column("workdir", sa.Text()),
        sa.Column("next_at", sa.DateTime(timezone=True)),
        sa.Column("paused", sa.Boolean(), nullable=False),
        sa.Column("begun", sa.Integer(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("set_id", name="pk_schedules"),
        sa.ForeignKeyConstraint(["set_id"], ["job_sets.id"], name="fk_schedules_set_id"),
    )
    op.create_index("ix_schedules_next_at", "schedules", ["next_at"])


def downgrade() -> None:
    op.drop_table("schedules")
