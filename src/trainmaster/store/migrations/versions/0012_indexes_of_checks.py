"""Results of checks by node, and those that name a GPU or found a fault: pages of nodes and search read these."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"

TELLING = sa.text("(\"check\" = 'gpu_model' OR verdict NOT IN ('pass', 'skip'))")


def upgrade() -> None:
    op.create_index("ix_check_results_node_attempt_id", "check_results", ["node", "attempt", "id"])
    op.create_index("ix_check_results_telling", "check_results", ["id"], sqlite_where=TELLING, postgresql_where=TELLING)


def downgrade() -> None:
    op.drop_index("ix_check_results_telling", "check_results")
    op.drop_index("ix_check_results_node_attempt_id", "check_results")
