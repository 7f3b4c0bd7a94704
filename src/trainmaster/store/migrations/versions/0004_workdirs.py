"""Chunks and snapshots of working folders."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0004"
down_revision = "0003"

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON().with_variant(JSONB(), "postgresql")
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "blobs",
        sa.Column("project", sa.String(63), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("size_bytes", BIG, nullable=False),
        sa.Column("place", sa.String(255), nullable=False),
        sa.Column("used_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("project", "sha256", name="pk_blobs"),
    )
    op.create_index("ix_blobs_used_at", "blobs", ["used_at"])
    op.create_table(
        "workdirs",
        sa.Column("project", sa.String(63), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("manifest", JSON, nullable=False),
        sa.Column("files", sa.Integer(), nullable=False),
        sa.Column("size_bytes", BIG, nullable=False),
        sa.Column("used_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("project", "sha256", name="pk_workdirs"),
    )


def downgrade() -> None:
    op.drop_table("workdirs")
    op.drop_table("blobs")
