"""The index of check results that failed or warned: pages of nodes look for these among all results."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"

BAD = sa.text("verdict IN ('fail', 'warn')")


def upgrade() -> None:
    columns = ["node", "check", "id"]
    op.create_index("ix_check_results_bad", "check_results", columns, sqlite_where=BAD, postgresql_where=BAD)


def downgrade() -> None:
    op.drop_index("ix_check_results_bad", "check_results")
