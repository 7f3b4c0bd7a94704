"""The index of open jobs by stage: the queue is read without a look at each row."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    is_open = sa.text("stage IS NOT NULL")
    columns = ["stage", "cancel_requested", "project", "id"]
    op.create_index("ix_jobs_stage", "jobs", columns, sqlite_where=is_open, postgresql_where=is_open)


def downgrade() -> None:
    op.drop_index("ix_jobs_stage", "jobs")
