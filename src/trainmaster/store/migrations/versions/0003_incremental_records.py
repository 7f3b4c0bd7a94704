"""Aggregates for incremental records; the identity of an event file."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0003"
down_revision = "0002"

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    for table in ("jobs", "iterations", "steps"):
        op.add_column(table, sa.Column("aggregate", JSON))
    op.add_column("streams", sa.Column("base", BIG, nullable=False, server_default=sa.text("0")))
    op.add_column("streams", sa.Column("tail", sa.String(128)))


def downgrade() -> None:
    for name in ("tail", "base"):
        op.drop_column("streams", name)
    for table in ("steps", "iterations", "jobs"):
        op.drop_column(table, "aggregate")
