"""Searches: sets of runs whose trials are proposed, their results, and what their pruners were given."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0013"
down_revision = "0012"

JSON = sa.JSON().with_variant(JSONB(), "postgresql")
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "searches",
        sa.Column("set_id", sa.String(36), nullable=False),
        sa.Column("search", JSON, nullable=False),
        sa.Column("template", JSON, nullable=False),
        sa.Column("word", sa.Text()),
        sa.Column("turn", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("set_id", name="pk_searches"),
        sa.ForeignKeyConstraint(["set_id"], ["job_sets.id"], name="fk_searches_set_id"),
    )
    op.create_table(
        "search_trials",
        sa.Column("set_id", sa.String(36), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(8), nullable=False),
        sa.Column("value", sa.Float()),
        sa.Column("step", BIG),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("attributes", JSON, nullable=False),
        sa.Column("read_attempt", sa.Integer(), nullable=False),
        sa.Column("read_offset", BIG, nullable=False),
        sa.Column("proposed", sa.Integer(), nullable=False),
        sa.Column("ended", sa.Integer()),
        sa.PrimaryKeyConstraint("set_id", "number", name="pk_search_trials"),
        sa.ForeignKeyConstraint(
            ["set_id", "number"], ["set_trials.set_id", "set_trials.number"], name="fk_search_trials_set_id"
        ),
    )
    op.create_table(
        "search_reports",
        sa.Column("set_id", sa.String(36), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("step", BIG, nullable=False),
        sa.Column("value", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("set_id", "number", "step", name="pk_search_reports"),
        sa.ForeignKeyConstraint(
            ["set_id", "number"], ["search_trials.set_id", "search_trials.number"], name="fk_search_reports_set_id"
        ),
    )


def downgrade() -> None:
    op.drop_table("search_reports")
    op.drop_table("search_trials")
    op.drop_table("searches")
