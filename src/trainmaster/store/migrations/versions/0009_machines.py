"""Machines of our own queue that take no jobs: drained by a person, or not able to say which GPUs they have."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "machines",
        sa.Column("place", sa.Text(), nullable=False),
        sa.Column("machine", sa.String(255), nullable=False),
        sa.Column("unknown", sa.Text()),
        sa.Column("drained", sa.Text()),
        sa.Column("drained_by", sa.String(63)),
        sa.Column("drained_at", TIME),
        sa.PrimaryKeyConstraint("place", "machine", name="pk_machines"),
    )


def downgrade() -> None:
    op.drop_table("machines")
