"""Times of schedules that had their runs: none comes again after a clock is set back."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    op.add_column("schedules", sa.Column("decided", sa.JSON().with_variant(JSONB(), "postgresql")))


def downgrade() -> None:
    op.drop_column("schedules", "decided")
