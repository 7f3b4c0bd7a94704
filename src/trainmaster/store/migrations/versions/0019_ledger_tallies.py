"""What the ledgers of final jobs came to."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    op.create_table(
        "ledger_tallies",
        sa.Column("job_id", sa.String(36), nullable=False),
        sa.Column("rules", sa.String(16), nullable=False),
        sa.Column("tally", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name="pk_ledger_tallies"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_ledger_tallies_job_id"),
    )


def downgrade() -> None:
    op.drop_table("ledger_tallies")
