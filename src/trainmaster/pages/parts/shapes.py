"""Answer shapes filled from rows, for several pages."""

from __future__ import annotations

from trainmaster.api.codec import fill
from trainmaster.api.jobs import AttemptShape, Job, Submitted
from trainmaster.pages.job import plain_spec
from trainmaster.store.rows import AttemptRow, JobRow


def job(row: JobRow) -> Job:
    return fill(Job, row, spec=plain_spec(row.spec))


def submitted(row: JobRow, *, new: bool) -> Submitted:
    return fill(Submitted, row, spec=plain_spec(row.spec), new=new)


def attempt(row: AttemptRow) -> AttemptShape:
    return fill(AttemptShape, row, exit_codes=row.exit.exit_codes if row.exit is not None else None)
