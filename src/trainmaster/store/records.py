"""What the lines of an attempt say of the training, as rows: seed 004's records, the checks, and what was kept.

jobs ─┬─ iterations ─┬─ steps (traj_gen, training, evaluation)
      │              ├─ epochs
      │              └─ evals
      ├─ check_results     one per check and node of an attempt
      └─ artifacts         what was kept of it in storage

Every row can be made again from the events. Each is named by what it is about, so that a line read twice, or the same
epoch told again by a resumed attempt, changes a row and adds none.
"""

from __future__ import annotations

from sqlalchemy import Column, Float, ForeignKey, Index, String, Table, Text, UniqueConstraint

from trainmaster.store.columns import UtcTime, big, json_column, metadata

iterations = Table(
    "iterations",
    metadata,
    Column("id", big(), primary_key=True),
    Column("job_id", String(36), ForeignKey("jobs.id"), nullable=False),
    Column("number", big(), nullable=False),  # a run that names none has iteration 1
    Column("config", json_column()),
    Column("started_at", UtcTime),
    Column("completed_at", UtcTime),
    Column("time_taken", Float),
    UniqueConstraint("job_id", "number"),
)

steps = Table(
    "steps",
    metadata,
    Column("id", big(), primary_key=True),
    Column("iteration_id", big(), ForeignKey("iterations.id"), nullable=False),
    Column("kind", String(16), nullable=False),  # traj_gen, training, evaluation
    Column("config", json_column()),
    Column("started_at", UtcTime),
    Column("completed_at", UtcTime),
    Column("step_time", Float),  # seconds
    UniqueConstraint("iteration_id", "kind"),
)

epochs = Table(
    "epochs",
    metadata,
    Column("id", big(), primary_key=True),
    Column("iteration_id", big(), ForeignKey("iterations.id"), nullable=False),
    Column("number", big(), nullable=False),
    Column("avg_loss", Float),
    Column("model_path", Text),
    Column("optimizer_path", Text),
    Column("metrics", json_column()),  # all of the event's data
    Column("at", UtcTime),
    Column("attempt", String(64), ForeignKey("attempts.id"), nullable=False),  # that told it last
    UniqueConstraint("iteration_id", "number"),
)

evals = Table(
    "evals",
    metadata,
    Column("id", big(), primary_key=True),
    Column("job_id", String(36), ForeignKey("jobs.id"), nullable=False),
    Column("iteration_id", big(), ForeignKey("iterations.id"), nullable=False),
    Column("model_id", Text),
    Column("metrics", json_column()),
    Column("at", UtcTime),
    Column("attempt", String(64), ForeignKey("attempts.id"), nullable=False),
    Column("stream", String(255), nullable=False),
    Column("offset", big(), nullable=False),
    UniqueConstraint("attempt", "stream", "offset"),
    Index(None, "job_id", "id"),
    Index(None, "model_id", "id"),
)

check_results = Table(
    "check_results",
    metadata,
    Column("id", big(), primary_key=True),
    Column("attempt", String(64), ForeignKey("attempts.id"), nullable=False),
    Column("node", Text, nullable=False),
    Column("check", String(64), nullable=False),
    Column("verdict", String(16), nullable=False),
    Column("took_s", Float),
    Column("findings", json_column()),
    Column("at", UtcTime),
    UniqueConstraint("attempt", "node", "check"),
)

artifacts = Table(
    "artifacts",
    metadata,
    Column("id", big(), primary_key=True),
    Column("job_id", String(36), ForeignKey("jobs.id"), nullable=False),
    Column("attempt", String(64), ForeignKey("attempts.id")),
    Column("kind", String(16), nullable=False),  # project, log, events, output, report
    Column("path", Text, nullable=False),  # under the job's own prefix of the storage
    Column("size_bytes", big(), nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("stored_at", UtcTime, nullable=False),
    UniqueConstraint("job_id", "path"),
)
