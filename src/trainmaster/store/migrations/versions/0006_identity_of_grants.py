"""What the machines of a grant said they are: one account may have several names."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0006"
down_revision = "0005"

JSON = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    op.add_column("target_grants", sa.Column("identity", JSON))


def downgrade() -> None:
    op.drop_column("target_grants", "identity")
