"""Tables of our own queue and of sets of runs; store/tables.py has all of them."""

from __future__ import annotations

from sqlalchemy import Boolean, Column, Float, ForeignKey, ForeignKeyConstraint, Index, Integer, String, Table, Text

from trainmaster.store.columns import SafeText, UtcTime, big, json_column, metadata

# A row with an attempt is booked: written with the attempt's intent, taken back when it is released.
devices = Table(
    "devices",
    metadata,
    Column("place", Text, primary_key=True),  # target without an account; of this machine with its host name
    Column("device", String(255), primary_key=True),  # UUID of a GPU or a MIG slice, MACHINE/slot-N
    Column("machine", String(255), nullable=False),
    Column("kind", String(8), nullable=False),  # gpu, slot
    Column("model", SafeText, nullable=False),
    Column("used", SafeText),  # who uses it besides us, or why it cannot be used now
    Column("seen_at", UtcTime, nullable=False),
    Column("attempt", String(64)),
    Column("since", UtcTime),  # when it was booked
    Index(None, "attempt"),
)

# A machine without a row takes jobs.
machines = Table(
    "machines",
    metadata,
    Column("place", Text, primary_key=True),
    Column("machine", String(255), primary_key=True),
    Column("unknown", SafeText),  # why nobody knows which GPUs it has: it never said
    Column("drained", SafeText),  # the reason
    Column("drained_by", String(63)),
    Column("drained_at", UtcTime),
)

# Derived: what the last pass of a place decided, so that those who ask for the queue do not decide it again.
queue_orders = Table(
    "queue_orders",
    metadata,
    Column("place", Text, primary_key=True),
    Column("at", UtcTime, nullable=False),
    Column("waits", SafeText, nullable=False),  # JSON, as store/capacity/order.py writes it
)

shares = Table(
    "shares",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("weight", Float, nullable=False),
    Column("quota", Integer),  # devices at once; NULL: no limit
)

job_sets = Table(
    "job_sets",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("name", String(63), nullable=False),
    Column("project", String(63), nullable=False),
    Column("parallel", Integer, nullable=False),  # trials that may be open at once
    Column("message", SafeText, nullable=False),  # why the next one does not begin
    Column("created_at", UtcTime, nullable=False),
    Column("cancel_at", UtcTime),
    Column("over", Boolean, nullable=False),  # nothing is left to begin or to cancel
    Column("submitted_by", String(63)),
    Column("submit_key", String(64)),  # SHA-256 of the idempotency key, as in `jobs`
    Column("submit_hash", String(64)),  # SHA-256 of what was submitted with it
    Index(None, "name", "created_at"),
    Index("uq_job_sets_project_submit_key", "project", "submit_key", unique=True),
)

set_trials = Table(
    "set_trials",
    metadata,
    Column("set_id", String(36), ForeignKey("job_sets.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("values", json_column(), nullable=False),
    Column("spec", json_column(), nullable=False),
    Column("job_id", String(36), index=True),  # NULL before its turn; not a foreign key: a job may be deleted
    Column("word", Text),  # what its target stood for at submission, as in `jobs`; NULL: of an earlier version
)

# A row for each job that a queued one waits for; gone when all of them are over and it may start.
job_after = Table(
    "job_after",
    metadata,
    Column("job_id", String(36), ForeignKey("jobs.id"), primary_key=True),
    Column("before", String(36), primary_key=True),  # not a foreign key: a job may be deleted
    Column("name", String(63), nullable=False),  # of that job
)

# A set whose trials begin again at every time of a schedule: each time adds rows to set_trials.
schedules = Table(
    "schedules",
    metadata,
    Column("set_id", String(36), ForeignKey("job_sets.id"), primary_key=True),
    Column("schedule", json_column(), nullable=False),
    Column("trials", json_column(), nullable=False),  # values, spec and word of each, as rows of set_trials get them
    Column("workdir", Text),  # of all of them: the snapshot is kept for the next time
    Column("next_at", UtcTime, index=True),  # NULL: paused, cancelled, or no time is left
    Column("paused", Boolean, nullable=False),
    Column("begun", Integer, nullable=False),  # numbers given to trials so far
    Column("note", SafeText, nullable=False),  # which times got no run, and why
    # Spans of times that were decided, each with its first and its last: after a clock is set back none comes again.
    Column("decided", json_column()),
)

# A set whose trials are proposed: its rows of set_trials come one by one, each with a row of search_trials.
searches = Table(
    "searches",
    metadata,
    Column("set_id", String(36), ForeignKey("job_sets.id"), primary_key=True),
    Column("search", json_column(), nullable=False),
    Column("template", json_column(), nullable=False),  # the document that each trial is made of
    Column("word", Text),  # what the target stood for at submission
    Column("turn", Integer, nullable=False),  # recorded changes so far: they are made one after the other
)

search_trials = Table(
    "search_trials",
    metadata,
    Column("set_id", String(36), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("state", String(8), nullable=False),  # running, complete, pruned, failed
    Column("value", Float),  # the newest of the metric; of a pruned one, that at which it was pruned
    Column("step", big()),  # of that value
    Column("message", SafeText, nullable=False),
    Column("attributes", json_column(), nullable=False),  # that the pruner keeps with a trial
    Column("read_attempt", Integer, nullable=False),  # events are read up to here
    Column("read_offset", big(), nullable=False),
    Column("proposed", Integer, nullable=False),  # turn
    Column("ended", Integer),  # turn; a proposal saw the ends of earlier turns, and no others
    ForeignKeyConstraint(["set_id", "number"], ["set_trials.set_id", "set_trials.number"]),
)

# Values of the metric that a pruner was given, in the order of their steps.
search_reports = Table(
    "search_reports",
    metadata,
    Column("set_id", String(36), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("step", big(), primary_key=True),
    Column("value", Float, nullable=False),
    ForeignKeyConstraint(["set_id", "number"], ["search_trials.set_id", "search_trials.number"]),
)
