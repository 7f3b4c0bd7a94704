"""Answer shapes filled from rows, for several pages."""

from __future__ import annotations

from typing import Any

from trainmaster.api.codec import fill
from trainmaster.api.jobs import AttemptShape, Created, Job, Submitted
from trainmaster.pages.job import plain_spec
from trainmaster.store.rows import AttemptRow, JobRow


def job(row: JobRow) -> Job:
    return fill(Job, row, spec=plain_spec(row.spec), **_other_names(row))


def created(row: JobRow, *, note: str | None) -> Created:
    return fill(Created, row, spec=plain_spec(row.spec), note=note, **_other_names(row))


def submitted(row: JobRow, *, new: bool, note: str | None) -> Submitted:
    return fill(Submitted, row, spec=plain_spec(row.spec), new=new, note=note, **_other_names(row))


def _other_names(row: JobRow) -> dict[str, Any]:
    return {"uuid": row.id, "project_id": row.project, "completed_at": row.ended_at}


def attempt(row: AttemptRow) -> AttemptShape:
    return fill(AttemptShape, row, exit_codes=row.exit.exit_codes if row.exit is not None else None)
