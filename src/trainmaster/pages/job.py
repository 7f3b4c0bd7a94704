"""One job: its verdict, figures, pre-flight checks, curves, attempts and spec. What the job page and reports show."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from trainmaster import __version__
from trainmaster.api.jobs import Attempt, JobMachine, JobPage
from trainmaster.api.run import IterationSummary
from trainmaster.core import schema
from trainmaster.core.failures import find_action
from trainmaster.core.plan import ExitRecord
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import Reason, Status
from trainmaster.pages.cost import Figures, figures, list_prices
from trainmaster.pages.parts import failed_check, iteration_summary
from trainmaster.pages.parts.run_summary import RunSummary
from trainmaster.store import audit, jobs
from trainmaster.store.attempts import list_attempts
from trainmaster.store.database import Database
from trainmaster.store.events import measure_recovery_s, scan_events
from trainmaster.store.nodes import list_checked, nodes_of
from trainmaster.store.page_rows.runs import find_in_run, find_origin
from trainmaster.store.rows import AttemptRow, JobRow

_NO_FIGURES = Figures()

_BATCH = 5_000  # events read at once


def read(
    db: Database, job_id: str, *, summary: RunSummary | None = None, now: datetime | None = None, scan: bool = True
) -> JobPage | None:
    """The page of a job, or None if there is no such job.

    With a `summary` kept from an earlier read of the same job, only the events since then are read; without `scan`,
    none.
    """
    summary = summary if summary is not None else RunSummary()
    with db.read():
        job = jobs.find_job(db, job_id)
        if job is None:
            return None
        while scan and (rows := scan_events(db, job_id, after=summary.cursor, limit=_BATCH)):
            for row in rows:
                summary.add(row)
            if len(rows) < _BATCH:
                break
        now = now or datetime.now(UTC)
        tried = list_attempts(db, job_id)
        page = build(
            job=job,
            attempts=tried,
            recovered_s=_measure_recoveries(db, tried),
            summary=summary,
            now=now,
            made_by=f"trainmaster report {job.id}",
            cost=figures(db, [job], now=now)[job.id],
            iterations=iteration_summary.read(db, job_id, over=job.status.final),
        )
        places = _list_machines(db, tried[-1], released=job.stage is None) if tried else ()
        advice = ""
        if (job.status, job.reason) == (Status.FAILED, Reason.CHECK_FAILED):
            advice = failed_check.advise(db, job, [place.name for place in places])
        return replace(
            page,
            action="; ".join(filter(None, (page.action, advice))) or None,
            price_cents_per_hour=list_prices(db, [job_id])[job_id].cents_per_hour,
            continues=find_in_run(db, job_id, later=False) if job.spec.resume_from is not None else None,
            again_of=find_origin(db, job_id, project=job.project),
            machines=places,
            cancelled_by=audit.find_canceller(db, job_id) if job.cancel_requested else None,
            continued_as=find_in_run(db, job_id, later=True) if job.status.final else None,
        )


def build(
    *,
    job: JobRow,
    attempts: Sequence[AttemptRow],
    summary: RunSummary,
    now: datetime,
    made_by: str,
    cost: Figures = _NO_FIGURES,
    iterations: tuple[IterationSummary, ...] = (),
    recovered_s: Mapping[int, float | None] | None = None,
) -> JobPage:
    """The page from rows of the database or of an attempt's folder. `cost`: so far, forecast."""
    ended_at = job.ended_at or (attempts[-1].ended_at if attempts and job.status.final else None)
    return JobPage(
        id=job.id,
        name=job.name,
        project=job.project,
        target=job.spec.target,
        status=job.status,
        stage=job.stage,
        reason=job.reason,
        message=job.message,
        action=_action(job),
        cancel_requested=job.cancel_requested,
        created_at=job.created_at,
        started_at=job.started_at,
        ended_at=ended_at,
        duration_s=_seconds(job.started_at, ended_at or now),
        attempts=tuple(_attempt(row, (recovered_s or {}).get(row.number)) for row in attempts),
        run=replace(
            summary.run(steps=job.spec.train.steps if job.spec.train else None, over=job.status.final),
            iterations=iterations,
        ),
        spec=plain_spec(job.spec),
        made_at=now,
        made_by=made_by,
        cost_cents=cost.so_far,
        forecast_cents=cost.at_end,
        forecast_bound=cost.bound,
        submitted_by=job.submitted_by,
        uuid=job.id,
        project_id=job.project,
        completed_at=ended_at,
        version=__version__,
    )


def plain_spec(spec: JobSpec) -> dict[str, Any]:
    """The spec as plain data, without what was not stated; a value whose name sounds like a secret is masked."""
    return mask_spec(schema.to_plain(spec))


def mask_spec(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a spec as its row holds it."""
    plain: dict[str, Any] = _stated(dict(stored))
    if "env" in plain:
        plain["env"] = mask_env(plain["env"])
    return plain


def mask_env(env: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of a job; a value whose name sounds like a secret is masked."""
    return {name: "(hidden)" if _SECRET.search(name) else text for name, text in env.items()}


# `env` is not for secrets, and people put them there all the same; a report is passed on.
_SECRET = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)


def _stated(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {name: _stated(item) for name, item in value.items()}
        return {name: item for name, item in kept.items() if item not in (None, {}, [])}
    return value


def _measure_recoveries(db: Database, tried: Sequence[AttemptRow]) -> dict[int, float | None]:
    """By attempt number: seconds from the last event of the newest attempt before that ran to its first step."""
    recoveries: dict[int, float | None] = {}
    ran: AttemptRow | None = None
    for row in tried:
        if ran is not None:
            recoveries[row.number] = measure_recovery_s(db, ran.id, row.id)
        ran = row if row.started_at is not None else ran
    return recoveries


def _attempt(row: AttemptRow, recovered_s: float | None = None) -> Attempt:
    record: ExitRecord | None = row.exit
    reason = row.reason or (record.reason if record else None)
    message = row.message or (record.message if record else "")
    return Attempt(
        number=row.number,
        report=row.report,
        ok=record.ok if record else None,
        reason=reason,
        action=find_action(reason, message),
        message=message,
        resumable=record.resumable if record else False,
        saved=record.saved if record else None,
        exit_codes=record.exit_codes if record else {},
        evidence=record.evidence if record else {},
        started_at=row.started_at,
        ended_at=row.ended_at,
        recovered_s=recovered_s,
        machines=nodes_of(row.handle),
        price_cents_per_hour=row.price_cents_per_hour,
    )


_CHECKS = (Reason.CHECK_FAILED, Reason.CHECK_INCOMPLETE)  # the same machine would fail again


def _action(job: JobRow) -> str | None:
    """What to do next. Where another attempt was allowed by the reason and not by the spec, the field to set."""
    if job.reason is None:
        return None
    action, limits = find_action(job.reason, job.message), job.spec.limits
    may_retry = limits.retry.get(job.reason.value, job.reason.rule.retry) and job.reason not in _CHECKS
    if job.status is Status.FAILED and may_retry and limits.attempts == 1:
        return f"{action}; with `limits: {{ attempts: 3 }}` it is tried again by itself"
    return action


def _list_machines(db: Database, newest: AttemptRow, *, released: bool) -> tuple[JobMachine, ...]:
    """The machines that the target has named; else those on which checks of the attempt ran."""
    checked = list_checked(db, newest.id)
    names = nodes_of(newest.handle) or checked
    return tuple(JobMachine(name=name, has_page=not released or name in checked) for name in names)


def _seconds(start: datetime | None, end: datetime | None) -> float | None:
    return None if start is None or end is None else max(0.0, (end - start).total_seconds())
