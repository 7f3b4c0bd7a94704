"""Idempotency keys of sets: a submission that is sent again makes no second set."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    op.add_column("job_sets", sa.Column("submit_key", sa.String(64)))
    op.add_column("job_sets", sa.Column("submit_hash", sa.String(64)))
    op.create_index("uq_job_sets_project_submit_key", "job_sets", ["project", "submit_key"], unique=True)


def downgrade() -> None:
    op.drop_index("uq_job_sets_project_submit_key", "job_sets")
    op.drop_column("job_sets", "submit_hash")
    op.drop_column("job_sets", "submit_key")
