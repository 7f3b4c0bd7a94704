"""One job: its verdict, figures, pre-flight checks, curves, attempts and spec. What the job page and reports show."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from trainmaster import __version__
from trainmaster.core import schema
from trainmaster.core.plan import ExitRecord
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import Reason, Stage, Status, TargetState
from trainmaster.pages.cost import figures
from trainmaster.pages.parts.run_summary import Fold, Run
from trainmaster.store import Database, jobs
from trainmaster.store.attempts import list_attempts
from trainmaster.store.events import scan_events
from trainmaster.store.rows import AttemptRow, JobRow

_BATCH = 5_000  # events read at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try and how it ended, with the evidence it left."""

    number: int
    report: TargetState | None
    ok: bool | None  # None: no exit record yet
    reason: Reason | None
    action: str | None
    message: str
    resumable: bool
    exit_codes: Mapping[str, int]
    evidence: Mapping[str, Any]
    started_at: datetime | None
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """Everything one page says of one job."""

    id: str
    name: str
    project: str
    target: str
    status: Status
    stage: Stage | None
    reason: Reason | None
    message: str
    action: str | None  # what a person should do, where the job did not end well
    cancel_requested: bool
    created_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    duration_s: float | None
    attempts: tuple[Attempt, ...]
    run: Run
    spec: Mapping[str, Any] | None
    made_at: datetime
    made_by: str  # the command that makes this report again
    cost_cents: int | None = None  # so far; None: nobody knows, or nobody was asked
    forecast_cents: int | None = None  # at its end
    version: str = __version__


Page = JobPage


def read(db: Database, job_id: str, *, fold: Fold | None = None, now: datetime | None = None) -> JobPage | None:
    """The page of a job, or None if there is no such job.

    With a `fold` kept from an earlier read of the same job, only the events since then are read.
    """
    fold = fold if fold is not None else Fold()
    with db.read():
        job = jobs.find_job(db, job_id)
        if job is None:
            return None
        while rows := scan_events(db, job_id, after=fold.cursor, limit=_BATCH):
            for row in rows:
                fold.add(row)
            if len(rows) < _BATCH:
                break
        now = now or datetime.now(UTC)
        return build(
            job=job,
            attempts=list_attempts(db, job_id),
            fold=fold,
            now=now,
            made_by=f"trainmaster report {job.id}",
            cost=figures(db, [job], now=now)[job.id],
        )


def build(
    *,
    job: JobRow,
    attempts: Sequence[AttemptRow],
    fold: Fold,
    now: datetime,
    made_by: str,
    cost: tuple[int | None, int | None] = (None, None),
) -> JobPage:
    """The page from rows, wherever they came from (the database, or an attempt's folder). `cost`: so far, forecast."""
    ended_at = job.ended_at or (attempts[-1].ended_at if attempts and job.status.final else None)
    return JobPage(
        id=job.id,
        name=job.name,
        project=job.project,
        target=job.target,
        status=job.status,
        stage=job.stage,
        reason=job.reason,
        message=job.message,
        action=job.reason.rule.action if job.reason else None,
        cancel_requested=job.cancel_requested,
        created_at=job.created_at,
        started_at=job.started_at,
        ended_at=ended_at,
        duration_s=_seconds(job.started_at, ended_at or now),
        attempts=tuple(_attempt(row) for row in attempts),
        run=fold.run(steps=job.spec.train.steps if job.spec.train else None, over=job.status.final),
        spec=plain_spec(job.spec),
        made_at=now,
        made_by=made_by,
        cost_cents=cost[0],
        forecast_cents=cost[1],
    )


def plain_spec(spec: JobSpec) -> dict[str, Any]:
    """The spec as plain data, without what was not stated; a value whose name sounds like a secret is masked."""
    plain: dict[str, Any] = _stated(schema.to_plain(spec))
    if "env" in plain:
        plain["env"] = {name: "(hidden)" if _SECRET.search(name) else text for name, text in plain["env"].items()}
    return plain


# `env` is not for secrets, and people put them there all the same; a report is passed on.
_SECRET = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)


def _stated(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {name: _stated(item) for name, item in value.items()}
        return {name: item for name, item in kept.items() if item not in (None, {}, [])}
    return value


def _attempt(row: AttemptRow) -> Attempt:
    record: ExitRecord | None = row.exit
    reason = row.reason or (record.reason if record else None)
    return Attempt(
        number=row.number,
        report=row.report,
        ok=record.ok if record else None,
        reason=reason,
        action=reason.rule.action if reason else None,
        message=row.message or (record.message if record else ""),
        resumable=record.resumable if record else False,
        exit_codes=record.exit_codes if record else {},
        evidence=record.evidence if record else {},
        started_at=row.started_at,
        ended_at=row.ended_at,
    )


def _seconds(start: datetime | None, end: datetime | None) -> float | None:
    return None if start is None or end is None else max(0.0, (end - start).total_seconds())
