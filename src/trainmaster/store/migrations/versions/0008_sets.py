"""Sets of runs, and their trials."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0008"
down_revision = "0007"

JSON = sa.JSON().with_variant(JSONB(), "postgresql")
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "job_sets",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("project", sa.String(63), nullable=False),
        sa.Column("parallel", sa.Integer(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("cancel_at", TIME),
        sa.Column("over", sa.Boolean(), nullable=False),
        sa.Column("submitted_by", sa.String(63)),
        sa.PrimaryKeyConstraint("id", name="pk_job_sets"),
    )
    op.create_index("ix_job_sets_name_created_at", "job_sets", ["name", "created_at"])
    op.create_table(
        "set_trials",
        sa.Column("set_id", sa.String(36), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("values", JSON, nullable=False),
        sa.Column("spec", JSON, nullable=False),
        sa.Column("job_id", sa.String(36)),
        sa.PrimaryKeyConstraint("set_id", "number", name="pk_set_trials"),
        sa.ForeignKeyConstraint(["set_id"], ["job_sets.id"], name="fk_set_trials_set_id"),
    )
    op.create_index("ix_set_trials_job_id", "set_trials", ["job_id"])


def downgrade() -> None:
    op.drop_index("ix_set_trials_job_id", "set_trials")
    op.drop_table("set_trials")
    op.drop_index("ix_job_sets_name_created_at", "job_sets")
    op.drop_table("job_sets")
