"""People who sign in by OpenID Connect, their sessions and tokens."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0015"
down_revision = "0014"

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON().with_variant(JSONB(), "postgresql")
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "people",
        sa.Column("id", BIG, nullable=False),
        sa.Column("issuer", sa.Text(), nullable=False),
        sa.Column("subject", sa.String(255), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("grants", JSON, nullable=False),
        sa.Column("signed_in_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_people"),
        sa.UniqueConstraint("name", name="uq_people_name"),
        sa.UniqueConstraint("issuer", "subject", name="uq_people_issuer_subject"),
    )
    op.create_table(
        "sessions",
        sa.Column("id", BIG, nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("person", BIG, nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("project", sa.String(63)),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("expires_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_sessions"),
        sa.UniqueConstraint("hash", name="uq_sessions_hash"),
        sa.ForeignKeyConstraint(["person"], ["people.id"], name="fk_sessions_person"),
    )
    op.create_index("ix_sessions_person", "sessions", ["person"])
    op.create_table(
        "token_owners",
        sa.Column("token", BIG, nullable=False, autoincrement=False),
        sa.Column("person", BIG, nullable=False),
        sa.PrimaryKeyConstraint("token", name="pk_token_owners"),
        sa.ForeignKeyConstraint(["token"], ["tokens.id"], name="fk_token_owners_token"),
        sa.ForeignKeyConstraint(["person"], ["people.id"], name="fk_token_owners_person"),
    )
    op.create_index("ix_token_owners_person", "token_owners", ["person"])


def downgrade() -> None:
    op.drop_table("token_owners")
    op.drop_table("sessions")
    op.drop_table("people")
