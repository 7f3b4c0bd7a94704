"""All tables. A change here needs a migration; a test compares the two.

jobs ─┬─ attempts ─┬─ streams        read offset of each stream of an attempt
      │            ├─ events         one row per line; key (attempt, stream, offset)
      │            ├─ instances      rented machines: inserted before the launch, gone when the cloud confirms it
      │            └─ check_results  one per check and node
      ├─ transitions                 append-only history of stages
      ├─ iterations ─┬─ steps        phases of an iteration: traj_gen, training, evaluation
      │              ├─ epochs
      │              └─ evals
      ├─ ledger_tallies              what the goodput ledger of a final job came to
      └─ artifacts                   objects in storage
blobs  workdirs                    chunks and snapshots of working folders, by project
job_sets ── set_trials             sets of runs; a trial becomes a job when its turn comes
schedules                          sets whose trials begin again at every time of a schedule
searches ── search_trials ── search_reports   sets whose trials are proposed: results, and what pruners were given
known_targets  target_grants       targets by name, and which project uses one as which account
devices  machines  shares          what our own queue gives out, who has it, and what each project may have
queue_orders                       who waits in it, in order, as its last pass decided
tokens ── token_owners ── people ── sessions  audit  budgets  webhooks  outbox ── deliveries

Iterations, steps, epochs, evals, check_results and ledger_tallies are derived and can be made again. No row holds a
secret: tokens are hashes, and a webhook's signing key is derived from the home folder's key file.
"""

from __future__ import annotations

from sqlalchemy import Boolean, Column, Float, ForeignKey, Index, Integer, String, Table, Text, UniqueConstraint, text

from trainmaster.store.capacity import tables as queue
from trainmaster.store.columns import SafeText, UtcTime, big, json_column, metadata

devices, machines, shares, queue_orders = queue.devices, queue.machines, queue.shares, queue.queue_orders
job_sets, set_trials, job_after = queue.job_sets, queue.set_trials, queue.job_after
schedules = queue.schedules
searches, search_trials, search_reports = queue.searches, queue.search_trials, queue.search_reports

jobs = Table(
    "jobs",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("name", String(63), nullable=False),
    Column("project", String(63), nullable=False),
    Column("target", Text, nullable=False),
    Column("status", String(16), nullable=False),
    Column("stage", String(16)),  # NULL: final
    Column("reason", String(32)),
    Column("message", SafeText, nullable=False),
    Column("spec", json_column(), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("cancel_requested", Boolean, nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("started_at", UtcTime),
    Column("ended_at", UtcTime),
    # What PROJECT and GROUP_ITERATION events say: when the project began there, how long it took, with which config.
    Column("project_started_at", UtcTime),
    Column("time_taken", Float),
    Column("training_config", json_column()),
    Column("aggregate", json_column()),
    Column("heard_at", UtcTime),  # when the last new event was taken in; a job that is silent for long has stalled
    Column("stalled_at", UtcTime),  # since when it is known to have stalled; NULL while it is heard of
    Column("rest_until", UtcTime),  # not to be worked on before: the backoff between tries, kept over a restart
    Column("tries", Integer, nullable=False, server_default=text("0")),  # of the present stage that failed in a row
    Column("stage_since", UtcTime),  # when the present stage began, for its deadline
    Column("cancel_at", UtcTime),  # when it was asked to stop, for the deadline of that
    # Who works on it now. Every write of a worker holds only while this token is still its own.
    Column("lease_token", String(36)),
    Column("lease_owner", String(255)),
    Column("lease_until", UtcTime),
    Column("submit_key", String(64)),  # SHA-256 of the idempotency key with which it was submitted
    Column(
        "submit_hash", String(64)
    ),  # SHA-256 of what was submitted with it: the same key with another spec is refused
    Column("submitted_by", String(63)),  # name of the token; NULL over loopback
    Column("gpus", big()),  # that it holds, as its spec says; NULL: to be read there, as rows of strangers are
    Index("uq_jobs_project_submit_key", "project", "submit_key", unique=True),
    # The listing is newest first, whole or filtered; each of these gives one page of it without a sort.
    Index(None, "created_at", "id"),
    Index(None, "status", "created_at", "id"),
    Index(None, "project", "created_at", "id"),
    # What the reconciler asks for at every tick: a handful of rows, however many jobs are final.
    Index(
        "ix_jobs_open", "created_at", sqlite_where=text("stage IS NOT NULL"), postgresql_where=text("stage IS NOT NULL")
    ),
    # The queue: ids and projects of ten thousand waiting jobs without a look at their rows, which hold whole specs.
    Index(
        "ix_jobs_stage", "stage", "cancel_requested", "project", "id",
        sqlite_where=text("stage IS NOT NULL"), postgresql_where=text("stage IS NOT NULL"),
    ),
)  # fmt: skip

attempts = Table(
    "attempts",
    metadata,
    Column("id", String(64), primary_key=True),  # "<job uuid>.<number>"
    Column("job_id", String(36), ForeignKey("jobs.id"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("handle", json_column()),
    Column("report", String(16)),
    Column("reason", String(32)),
    Column("message", SafeText, nullable=False),
    Column("exit", json_column()),
    Column("created_at", UtcTime, nullable=False),
    Column("started_at", UtcTime),
    Column("ended_at", UtcTime),
    Column("price_cents_per_hour", Float),  # of the whole attempt, as it was when it was placed; NULL: not known
    Column("released_at", UtcTime),  # when everything it held was given back: until then it costs
    # Why the control plane wants it to stop (a limit, a budget, a stall), and since when; a user's wish is the job's.
    Column("stop_reason", String(32)),
    Column("stop_at", UtcTime),
    UniqueConstraint("job_id", "number"),
)

streams = Table(
    "streams",
    metadata,
    Column("attempt", String(64), ForeignKey("attempts.id"), primary_key=True),
    Column("stream", String(255), primary_key=True),
    Column("offset", big(), nullable=False),  # every byte before it is in `events` or over the quota, none after it
    Column("heard_at", UtcTime),  # when it last grew
    Column("inside", Boolean, nullable=False),  # the offset lies inside a line too long to be kept whole
    Column("base", big(), nullable=False, server_default=text("0")),  # offset at which the present file begins
    Column("tail", String(128)),  # last bytes before the offset, as hex: another file at this place differs
    Column("kept", big(), nullable=False, server_default=text("0")),  # bytes that its lines take here, about
)

events = Table(
    "events",
    metadata,
    Column("attempt", String(64), ForeignKey("attempts.id"), primary_key=True),
    Column("stream", String(255), primary_key=True),
    Column("offset", big(), primary_key=True, autoincrement=False),
    Column("length", big(), nullable=False),
    Column("ts", UtcTime),
    Column("seq", big()),
    Column("phase", Text),  # NULL: a line that is not an event, kept as `text`
    Column("event", Text),
    Column("iteration", big()),
    Column("epoch", big()),
    Column("data", json_column()),
    Column("extra", json_column()),
    Column("fault", Text),
    Column("text", Text),
    Index(None, "attempt", "stream", "phase", "offset"),
    Index(
        "ix_events_faults", "attempt", "offset",
        sqlite_where=text("fault IS NOT NULL"), postgresql_where=text("fault IS NOT NULL"),
    ),
    # Not WITHOUT ROWID, although the key would fit: SQLite then walks the key for every query of an attempt and leaves
    # both indexes aside, so that one rare phase costs a look at every event (measured: 80 ms against 1 at 100,000).
)  # fmt: skip

transitions = Table(
    "transitions",
    metadata,
    Column("id", big(), primary_key=True),
    Column("job_id", String(36), ForeignKey("jobs.id"), nullable=False),
    Column("at", UtcTime, nullable=False),
    Column("stage_from", String(16)),  # NULL: the job was made
    Column("stage_to", String(16)),  # NULL: the job is final
    Column("status", String(16), nullable=False),
    Column("reason", String(32)),
    Column("message", SafeText, nullable=False),
    Index(None, "job_id", "id"),
)

instances = Table(
    "instances",
    metadata,
    Column("id", big(), primary_key=True),
    Column("attempt", String(64), ForeignKey("attempts.id"), nullable=False),
    Column("target", Text, nullable=False),
    Column("nonce", String(64), nullable=False, unique=True),  # its tag in the cloud, committed before it is launched
    Column("provider_id", String(128)),  # NULL: not launched yet, or unknown
    Column("kind", String(128)),
    Column("region", String(64)),
    Column("state", String(16), nullable=False),  # intended, launching, active, terminating, gone, lost
    Column("price_cents_per_hour", Float),
    Column("address", Text),
    Column("created_at", UtcTime, nullable=False),
    Column("launched_at", UtcTime),
    Column("gone_at", UtcTime),  # when the cloud said so
    Column("detail", json_column()),
    Index(None, "attempt"),
    Index(None, "state", "id"),
)

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
    Column("aggregate", json_column()),  # what merging later lines needs (spans.py)
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
    Column("aggregate", json_column()),
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

# Results whose findings a search reads: they say who a GPU is, or what is wrong. Nine of ten say neither.
TELLING = text("(\"check\" = 'gpu_model' OR verdict NOT IN ('pass', 'skip'))")
# Results that stand against a node until the same check is measured again: hardly any, and each page of nodes asks.
BAD = text("verdict IN ('fail', 'warn')")

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
    Index(None, "node", "attempt", "id"),  # which attempts looked at a node, newest first, without their findings
    Index("ix_check_results_telling", "id", sqlite_where=TELLING, postgresql_where=TELLING),
    Index("ix_check_results_bad", "node", "check", "id", sqlite_where=BAD, postgresql_where=BAD),
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

tokens = Table(
    "tokens",
    metadata,
    Column("id", big(), primary_key=True),
    Column("name", String(63), nullable=False, unique=True),
    Column("hash", String(64), nullable=False, unique=True),  # SHA-256; the token has 256 random bits, so no salt
    Column("role", String(16), nullable=False),  # admin, user, viewer
    Column("project", String(63)),  # NULL: every project
    Column("created_at", UtcTime, nullable=False),
    Column("used_at", UtcTime),
    Column("revoked_at", UtcTime),
)

# Who signed in by OpenID Connect.
people = Table(
    "people",
    metadata,
    Column("id", big(), primary_key=True),
    Column("issuer", Text, nullable=False),
    Column("subject", String(255), nullable=False),  # `sub` of the ID token
    Column("name", String(63), nullable=False, unique=True),  # in the audit trail; has an @, unlike a token's
    Column("grants", json_column(), nullable=False),  # [role, project] pairs of the last sign-in
    Column("signed_in_at", UtcTime, nullable=False),
    UniqueConstraint("issuer", "subject"),
)

sessions = Table(
    "sessions",
    metadata,
    Column("id", big(), primary_key=True),
    Column("hash", String(64), nullable=False, unique=True),  # SHA-256 of the 256 random bits in the cookie
    Column("person", big(), ForeignKey("people.id"), nullable=False),
    Column("role", String(16), nullable=False),
    Column("project", String(63)),  # NULL: every project
    Column("created_at", UtcTime, nullable=False),
    Column("expires_at", UtcTime, nullable=False),
    Index(None, "person"),
)

# Tokens that a person made; others are an admin's. Such a token lives only while its person signs in.
token_owners = Table(
    "token_owners",
    metadata,
    Column("token", big(), ForeignKey("tokens.id"), primary_key=True, autoincrement=False),
    Column("person", big(), ForeignKey("people.id"), nullable=False),
    Index(None, "person"),
)

# A row means that the object is in storage, whole.
blobs = Table(
    "blobs",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("sha256", String(64), primary_key=True),
    Column("size_bytes", big(), nullable=False),
    Column("place", String(255), nullable=False),  # path in storage; another one after each removal
    Column("used_at", UtcTime, nullable=False),  # when an upload last asked for it
    Index(None, "used_at"),
)

# A row means that every chunk of the snapshot has its row in `blobs`.
workdirs = Table(
    "workdirs",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("sha256", String(64), primary_key=True),  # of the manifest
    Column("manifest", json_column(), nullable=False),  # SHA-256 of each chunk of the manifest itself
    Column("files", Integer, nullable=False),
    Column("size_bytes", big(), nullable=False),
    Column("used_at", UtcTime, nullable=False),
)

audit = Table(
    "audit",
    metadata,
    Column("id", big(), primary_key=True),
    Column("at", UtcTime, nullable=False),
    Column("who", String(63), nullable=False),  # a token's or person's name, `loopback`, or `control`
    Column("action", String(64), nullable=False),  # job.submit, job.cancel, token.create, budget.set, …
    Column("subject", Text, nullable=False),
    Column("detail", json_column()),
    Index(None, "subject", "id"),
)

budgets = Table(
    "budgets",
    metadata,
    Column("id", big(), primary_key=True),
    Column("project", String(63), nullable=False),
    Column("period", String(8), nullable=False),  # total, month
    Column("cap_cents", big(), nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("warned_at", UtcTime),
    UniqueConstraint("project", "period"),
)

webhooks = Table(
    "webhooks",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("project", String(63)),  # NULL: every project
    Column("url", Text, nullable=False),  # without credentials
    Column("topics", json_column(), nullable=False),  # empty list: all
    Column("created_at", UtcTime, nullable=False),
    Column("enabled", Boolean, nullable=False),
)

outbox = Table(
    "outbox",
    metadata,
    Column("id", big(), primary_key=True),
    Column("key", String(255), nullable=False, unique=True),  # what it tells of: the same news is never put in twice
    Column("at", UtcTime, nullable=False),
    Column("topic", String(32), nullable=False),  # job.completed, job.failed, job.stalled, budget.exceeded, …
    Column("project", String(63), nullable=False),
    Column("job_id", String(36), ForeignKey("jobs.id")),
    Column("payload", json_column(), nullable=False),
    Column("spread_at", UtcTime),  # when its deliveries were made; NULL: not yet
    Index("ix_outbox_new", "id", sqlite_where=text("spread_at IS NULL"), postgresql_where=text("spread_at IS NULL")),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("id", big(), primary_key=True),
    Column("outbox_id", big(), ForeignKey("outbox.id"), nullable=False),
    Column("channel", Text, nullable=False),  # webhook:<id>, or the name of a channel of the server's config
    Column("tries", Integer, nullable=False),
    Column("next_at", UtcTime),  # NULL: done, or given up
    Column("done_at", UtcTime),
    Column("status", Integer),
    Column("error", SafeText),
    Column("took_s", Float),
    UniqueConstraint("outbox_id", "channel"),
    Index("ix_deliveries_due", "channel", "next_at", sqlite_where=text("next_at IS NOT NULL"),
          postgresql_where=text("next_at IS NOT NULL")),
)  # fmt: skip

# Derived: what the goodput ledger of a final job came to, so that a server that starts need not read its events again.
ledger_tallies = Table(
    "ledger_tallies", metadata,
    Column("job_id", String(36), ForeignKey("jobs.id"), primary_key=True),
    Column("rules", String(16), nullable=False),  # digest of the code that made it
    Column("tally", Text, nullable=False),  # JSON, as store/page_rows/ledger_tallies.py writes it
)  # fmt: skip

known_targets = Table(
    "known_targets",
    metadata,
    Column("name", String(63), primary_key=True),  # what a spec writes
    Column("word", Text, nullable=False),  # what it stands for: "ssh:/etc/trainmaster/lab.yaml"
    Column("created_at", UtcTime, nullable=False),
)

target_grants = Table(
    "target_grants",
    metadata,
    Column("target", String(127), primary_key=True),  # a known name, or a word that names no file: "local", "ssh:lab"
    Column("project", String(63), primary_key=True),
    Column("user", String(255)),  # account of the project's jobs there; NULL: the one of the target's settings
    Column("identity", json_column()),  # place → machine and user that answered there; NULL: never asked
    Column("created_at", UtcTime, nullable=False),
)
