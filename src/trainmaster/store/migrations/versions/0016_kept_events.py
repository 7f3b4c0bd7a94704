"""What the events of each stream take in the database: a job has a quota of it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("streams", sa.Column("kept", BIG, nullable=False, server_default=sa.text("0")))
    op.execute('UPDATE streams SET kept = "offset"')  # of what is there already: its bytes, without what rows cost


def downgrade() -> None:
    op.drop_column("streams", "kept")
