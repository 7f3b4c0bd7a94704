"""Targets that an administrator made known, and the projects that may use each."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "known_targets",
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("word", sa.Text(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_known_targets"),
    )
    op.create_table(
        "target_grants",
        sa.Column("target", sa.String(127), nullable=False),
        sa.Column("project", sa.String(63), nullable=False),
        sa.Column("user", sa.String(255)),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("target", "project", name="pk_target_grants"),
    )


def downgrade() -> None:
    op.drop_table("target_grants")
    op.drop_table("known_targets")
