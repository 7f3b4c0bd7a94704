"""Answer shapes filled from rows, for several pages."""

from __future__ import annotations

from typing import Any

from trainmaster.api.codec import fill
from trainmaster.api.jobs import AttemptShape, Created, Job, JobLine, Submitted
from trainmaster.pages.job import plain_spec
from trainmaster.store.heads import JobHead
from trainmaster.store.rows import AttemptRow, JobRow

_OF_EVENTS = ("project_started_at", "time_taken", "training_config", "heard_at", "stalled_at")
_COSTS = ("cost_cents", "forecast_cents", "forecast_bound", "price_cents_per_hour")
_OF_SPEC = ("resume_from", "again_of")
_FIGURES = ("step", "steps", "progress", "loss", "loss_text", "tokens_per_s", *_COSTS, *_OF_SPEC)


def job(row: JobRow | JobHead) -> Job:
    """A job; without its spec and what its events say where its stored spec cannot be read."""
    if isinstance(row, JobHead):
        return fill(Job, row, spec={}, **dict.fromkeys(_OF_EVENTS), **_other_names(row))
    return fill(Job, row, spec=plain_spec(row.spec), **_other_names(row))


def line_without_spec(head: JobHead) -> JobLine:
    """A job whose stored spec cannot be read, without its figures."""
    return fill(JobLine, head, machines=(), **dict.fromkeys(_FIGURES), **_other_names(head))


def created(row: JobRow, *, note: str | None) -> Created:
    return fill(Created, row, spec=plain_spec(row.spec), note=note, **_other_names(row))


def submitted(row: JobRow, *, new: bool, note: str | None) -> Submitted:
    return fill(Submitted, row, spec=plain_spec(row.spec), new=new, note=note, **_other_names(row))


def _other_names(row: JobRow | JobHead) -> dict[str, Any]:
    return {"uuid": row.id, "project_id": row.project, "completed_at": row.ended_at}


def attempt(row: AttemptRow) -> AttemptShape:
    return fill(AttemptShape, row, exit_codes=row.exit.exit_codes if row.exit is not None else None)
