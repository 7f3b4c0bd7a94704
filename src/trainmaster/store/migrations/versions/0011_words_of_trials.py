"""What the target of a trial stood for when its set was submitted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.add_column("set_trials", sa.Column("word", sa.Text()))


def downgrade() -> None:
    op.drop_column("set_trials", "word")
