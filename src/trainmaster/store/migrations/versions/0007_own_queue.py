"""Devices that our own queue gives out, and what each project may have of them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "devices",
        sa.Column("place", sa.Text(), nullable=False),
        sa.Column("device", sa.String(255), nullable=False),
        sa.Column("machine", sa.String(255), nullable=False),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("used", sa.Text()),
        sa.Column("seen_at", TIME, nullable=False),
        sa.Column("attempt", sa.String(64)),
        sa.Column("since", TIME),
        sa.PrimaryKeyConstraint("place", "device", name="pk_devices"),
    )
    op.create_index("ix_devices_attempt", "devices", ["attempt"])
    op.create_table(
        "shares",
        sa.Column("project", sa.String(63), nullable=False),
        sa.Column("weight", sa.Float(), nullable=False),
        sa.Column("quota", sa.Integer()),
        sa.PrimaryKeyConstraint("project", name="pk_shares"),
    )


def downgrade() -> None:
    op.drop_table("shares")
    op.drop_index("ix_devices_attempt", "devices")
    op.drop_table("devices")
