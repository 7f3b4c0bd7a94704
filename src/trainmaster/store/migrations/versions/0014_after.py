"""Jobs that a queued job waits for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.create_table(
        "job_after",
        sa.Column("job_id", sa.String(36), nullable=False),
        sa.Column("before", sa.String(36), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_after_job_id"),
        sa.PrimaryKeyConstraint("job_id", "before", name="pk_job_after"),
    )


def downgrade() -> None:
    op.drop_table("job_after")
