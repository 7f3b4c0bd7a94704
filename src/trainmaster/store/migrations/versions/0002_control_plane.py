"""Records of the training, money, messages, tokens, leases."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0002"
down_revision = "0001"

# Written out, not taken from the tables: a migration must go on meaning what it meant when they have moved on.
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON().with_variant(JSONB(), "postgresql")
TIME = sa.DateTime(timezone=True)

ADDED = {
    "jobs": (
        "project_started_at time_taken training_config heard_at stalled_at rest_until tries stage_since cancel_at "
        "lease_token lease_owner lease_until submit_key submit_hash submitted_by"
    ),
    "attempts": "price_cents_per_hour released_at stop_reason stop_at",
    "streams": "heard_at",
}
TABLES = (
    "steps instances evals epochs deliveries check_results artifacts outbox iterations webhooks tokens budgets audit"
)


def upgrade() -> None:
    _add_columns()
    _create_access_and_budgets()
    _create_iterations_and_outbox()
    _create_artifacts_and_checks()
    _create_epochs_and_evals()
    _create_instances_and_steps()


def _add_columns() -> None:
    op.add_column("jobs", sa.Column("project_started_at", TIME))
    op.add_column("jobs", sa.Column("time_taken", sa.Float()))
    op.add_column("jobs", sa.Column("training_config", JSON))
    op.add_column("jobs", sa.Column("heard_at", TIME))
    op.add_column("jobs", sa.Column("stalled_at", TIME))
    op.add_column("jobs", sa.Column("rest_until", TIME))
    op.add_column("jobs", sa.Column("tries", sa.Integer(), nullable=False, server_default=sa.text("0")))
    op.add_column("jobs", sa.Column("stage_since", TIME))
    op.add_column("jobs", sa.Column("cancel_at", TIME))
    op.add_column("jobs", sa.Column("lease_token", sa.String(36)))
    op.add_column("jobs", sa.Column("lease_owner", sa.String(255)))
    op.add_column("jobs", sa.Column("lease_until", TIME))
    op.add_column("jobs", sa.Column("submit_key", sa.String(64)))
    op.add_column("jobs", sa.Column("submit_hash", sa.String(64)))
    op.add_column("jobs", sa.Column("submitted_by", sa.String(63)))
    op.add_column("attempts", sa.Column("price_cents_per_hour", sa.Float()))
    op.add_column("attempts", sa.Column("released_at", TIME))
    op.add_column("attempts", sa.Column("stop_reason", sa.String(32)))
    op.add_column("attempts", sa.Column("stop_at", TIME))
    op.add_column("streams", sa.Column("heard_at", TIME))
    op.create_index("uq_jobs_project_submit_key", "jobs", ["project", "submit_key"], unique=True)


def _create_access_and_budgets() -> None:
    op.create_table(
        "audit",
        sa.Column("id", BIG, nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.Column("who", sa.String(63), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("detail", JSON),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    op.create_index("ix_audit_subject_id", "audit", ["subject", "id"])
    op.create_table(
        "budgets",
        sa.Column("id", BIG, nullable=False),
        sa.Column("project", sa.String(63), nullable=False),
        sa.Column("period", sa.String(8), nullable=False),
        sa.Column("cap_cents", BIG, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("warned_at", TIME),
        sa.PrimaryKeyConstraint("id", name="pk_budgets"),
        sa.UniqueConstraint("project", "period", name="uq_budgets_project_period"),
    )
    op.create_table(
        "tokens",
        sa.Column("id", BIG, nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("project", sa.String(63)),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("used_at", TIME),
        sa.Column("revoked_at", TIME),
        sa.PrimaryKeyConstraint("id", name="pk_tokens"),
        sa.UniqueConstraint("name", name="uq_tokens_name"),
        sa.UniqueConstraint("hash", name="uq_tokens_hash"),
    )
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("project", sa.String(63)),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("topics", JSON, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_webhooks"),
    )


def _create_iterations_and_outbox() -> None:
    op.create_table(
        "iterations",
        sa.Column("id", BIG, nullable=False),
        sa.Column("job_id", sa.String(36), nullable=False),
        sa.Column("number", BIG, nullable=False),
        sa.Column("config", JSON),
        sa.Column("started_at", TIME),
        sa.Column("completed_at", TIME),
        sa.Column("time_taken", sa.Float()),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_iterations_job_id"),
        sa.PrimaryKeyConstraint("id", name="pk_iterations"),
        sa.UniqueConstraint("job_id", "number", name="uq_iterations_job_id_number"),
    )
    op.create_table(
        "outbox",
        sa.Column("id", BIG, nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.Column("topic", sa.String(32), nullable=False),
        sa.Column("project", sa.String(63), nullable=False),
        sa.Column("job_id", sa.String(36)),
        sa.Column("payload", JSON, nullable=False),
        sa.Column("spread_at", TIME),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_outbox_job_id"),
        sa.PrimaryKeyConstraint("id", name="pk_outbox"),
        sa.UniqueConstraint("key", name="uq_outbox_key"),
    )
    new = sa.text("spread_at IS NULL")
    op.create_index("ix_outbox_new", "outbox", ["id"], sqlite_where=new, postgresql_where=new)


def _create_artifacts_and_checks() -> None:
    op.create_table(
        "artifacts",
        sa.Column("id", BIG, nullable=False),
        sa.Column("job_id", sa.String(36), nullable=False),
        sa.Column("attempt", sa.String(64)),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("size_bytes", BIG, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("stored_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(["attempt"], ["attempts.id"], name="fk_artifacts_attempt"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_artifacts_job_id"),
        sa.PrimaryKeyConstraint("id", name="pk_artifacts"),
        sa.UniqueConstraint("job_id", "path", name="uq_artifacts_job_id_path"),
    )
    op.create_table(
        "check_results",
        sa.Column("id", BIG, nullable=False),
        sa.Column("attempt", sa.String(64), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("check", sa.String(64), nullable=False),
        sa.Column("verdict", sa.String(16), nullable=False),
        sa.Column("took_s", sa.Float()),
        sa.Column("findings", JSON),
        sa.Column("at", TIME),
        sa.ForeignKeyConstraint(["attempt"], ["attempts.id"], name="fk_check_results_attempt"),
        sa.PrimaryKeyConstraint("id", name="pk_check_results"),
        sa.UniqueConstraint("attempt", "node", "check", name="uq_check_results_attempt_node_check"),
    )
    op.create_table(
        "deliveries",
        sa.Column("id", BIG, nullable=False),
        sa.Column("outbox_id", BIG, nullable=False),
        sa.Column("channel", sa.Text(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("next_at", TIME),
        sa.Column("done_at", TIME),
        sa.Column("status", sa.Integer()),
        sa.Column("error", sa.Text()),
        sa.Column("took_s", sa.Float()),
        sa.ForeignKeyConstraint(["outbox_id"], ["outbox.id"], name="fk_deliveries_outbox_id"),
        sa.PrimaryKeyConstraint("id", name="pk_deliveries"),
        sa.UniqueConstraint("outbox_id", "channel", name="uq_deliveries_outbox_id_channel"),
    )
    due = sa.text("next_at IS NOT NULL")
    op.create_index("ix_deliveries_due", "deliveries", ["channel", "next_at"], sqlite_where=due, postgresql_where=due)


def _create_epochs_and_evals() -> None:
    op.create_table(
        "epochs",
        sa.Column("id", BIG, nullable=False),
        sa.Column("iteration_id", BIG, nullable=False),
        sa.Column("number", BIG, nullable=False),
        sa.Column("avg_loss", sa.Float()),
        sa.Column("model_path", sa.Text()),
        sa.Column("optimizer_path", sa.Text()),
        sa.Column("metrics", JSON),
        sa.Column("at", TIME),
        sa.Column("attempt", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(["attempt"], ["attempts.id"], name="fk_epochs_attempt"),
        sa.ForeignKeyConstraint(["iteration_id"], ["iterations.id"], name="fk_epochs_iteration_id"),
        sa.PrimaryKeyConstraint("id", name="pk_epochs"),
        sa.UniqueConstraint("iteration_id", "number", name="uq_epochs_iteration_id_number"),
    )
    op.create_table(
        "evals",
        sa.Column("id", BIG, nullable=False),
        sa.Column("job_id", sa.String(36), nullable=False),
        sa.Column("iteration_id", BIG, nullable=False),
        sa.Column("model_id", sa.Text()),
        sa.Column("metrics", JSON),
        sa.Column("at", TIME),
        sa.Column("attempt", sa.String(64), nullable=False),
        sa.Column("stream", sa.String(255), nullable=False),
        sa.Column("offset", BIG, nullable=False),
        sa.ForeignKeyConstraint(["attempt"], ["attempts.id"], name="fk_evals_attempt"),
        sa.ForeignKeyConstraint(["iteration_id"], ["iterations.id"], name="fk_evals_iteration_id"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_evals_job_id"),
        sa.PrimaryKeyConstraint("id", name="pk_evals"),
        sa.UniqueConstraint("attempt", "stream", "offset", name="uq_evals_attempt_stream_offset"),
    )
    op.create_index("ix_evals_job_id_id", "evals", ["job_id", "id"])
    op.create_index("ix_evals_model_id_id", "evals", ["model_id", "id"])


def _create_instances_and_steps() -> None:
    op.create_table(
        "instances",
        sa.Column("id", BIG, nullable=False),
        sa.Column("attempt", sa.String(64), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("nonce", sa.String(64), nullable=False),
        sa.Column("provider_id", sa.String(128)),
        sa.Column("kind", sa.String(128)),
        sa.Column("region", sa.String(64)),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("price_cents_per_hour", sa.Float()),
        sa.Column("address", sa.Text()),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("launched_at", TIME),
        sa.Column("gone_at", TIME),
        sa.Column("detail", JSON),
        sa.ForeignKeyConstraint(["attempt"], ["attempts.id"], name="fk_instances_attempt"),
        sa.PrimaryKeyConstraint("id", name="pk_instances"),
        sa.UniqueConstraint("nonce", name="uq_instances_nonce"),
    )
    op.create_index("ix_instances_attempt", "instances", ["attempt"])
    op.create_index("ix_instances_state_id", "instances", ["state", "id"])
    op.create_table(
        "steps",
        sa.Column("id", BIG, nullable=False),
        sa.Column("iteration_id", BIG, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("config", JSON),
        sa.Column("started_at", TIME),
        sa.Column("completed_at", TIME),
        sa.Column("step_time", sa.Float()),
        sa.ForeignKeyConstraint(["iteration_id"], ["iterations.id"], name="fk_steps_iteration_id"),
        sa.PrimaryKeyConstraint("id", name="pk_steps"),
        sa.UniqueConstraint("iteration_id", "kind", name="uq_steps_iteration_id_kind"),
    )


def downgrade() -> None:
    for table in TABLES.split():
        op.drop_table(table)
    op.drop_index("uq_jobs_project_submit_key", "jobs")
    for table, columns in ADDED.items():
        for column in columns.split():
            op.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
