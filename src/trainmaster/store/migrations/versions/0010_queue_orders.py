"""The order of each queue as its last pass decided it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_table(
        "queue_orders",
        sa.Column("place", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("waits", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("place", name="pk_queue_orders"),
    )


def downgrade() -> None:
    op.drop_table("queue_orders")
