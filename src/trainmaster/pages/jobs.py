"""The list of jobs: newest first, filtered, a page at a time, each with how far it is and how fast it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from trainmaster.api.codec import fill
from trainmaster.api.jobs import JobLine, JobsPage
from trainmaster.core.ids import UUID_PATTERN
from trainmaster.core.states import Status
from trainmaster.pages.cost import Figures, figures, list_prices
from trainmaster.pages.parts.downsample import number, sick_text, whole
from trainmaster.pages.parts.run_summary import progress
from trainmaster.store import audit, events
from trainmaster.store.attempts import list_machines
from trainmaster.store.costs import is_any_priced
from trainmaster.store.database import Database
from trainmaster.store.jobs import count_by_status, list_jobs
from trainmaster.store.page_rows.runs import count_found
from trainmaster.store.rows import JobRow

MOST = 200  # jobs on one page
SORTED = 500  # the newest, of a list that is sorted by a figure: no index has one
CURSOR = rf"\d{{1,17}}:{UUID_PATTERN}"  # microseconds since 1970, and the id of the job
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def read(
    db: Database,
    *,
    status: Status | None = None,
    project: str | None = None,
    find: str | None = None,
    by: str | None = None,
    name: str | None = None,
    limit: int = 50,
    offset: int = 0,
    after: str | None = None,
    now: datetime | None = None,
) -> JobsPage:
    """The jobs that fit, newest first, behind the cursor `after`.

    Costs a handful of queries, whatever the number of jobs and events.
    """
    limit = max(1, min(limit, SORTED))
    with db.read():  # one view: the number of jobs and the jobs are of one moment
        place = _parse_cursor(after) if after is not None else None
        rows = list_jobs(
            db, status=status, project=project, word=find, by=by, name=name, limit=limit, offset=offset, after=place
        )
        now = now or datetime.now(UTC)
        shown = lines(db, rows, now=now)
        if (find, by, name) == (None, None, None):
            each = count_by_status(db, project=project)
        else:
            each = count_found(db, project=project, word=find, by=by, name=name)
        counts = {word.value: count for word, count in each.items()}
        total = counts[status.value] if status else sum(counts.values())
    return JobsPage(
        jobs=shown,
        total=total,
        counts=counts,
        status=status,
        project=project,
        find=find,
        by=by,
        limit=limit,
        offset=offset,
        made_at=now,
        next=_render_cursor(rows[-1]) if rows else None,
    )


# How a list is sorted: by what, and whether a high figure is the better one.
ORDERS: Mapping[str, tuple[str, bool]] = {
    "loss": ("loss", False),
    "tokens": ("tokens_per_s", True),
    "progress": ("step", True),
    "cost": ("spent_cents", False),
}


def sort(page: JobsPage, order: str, *, limit: int, offset: int) -> JobsPage:
    """A part of the newest jobs, the best of this order first (`-loss`: last). Jobs without a number are the last."""
    name, high = ORDERS[order.removeprefix("-")]
    values = {each.id: getattr(each, name) for each in page.jobs}
    known = [each for each in page.jobs if values[each.id] is not None]
    known.sort(key=lambda each: values[each.id], reverse=high != order.startswith("-"))
    rest = sorted((each for each in page.jobs if values[each.id] is None), key=lambda each: each.loss_text is None)
    shown = tuple([*known, *rest][offset : offset + limit])
    return replace(page, jobs=shown, total=len(page.jobs), limit=limit, offset=offset, next=None)


def has_costs(db: Database, page: JobsPage) -> bool:
    """Whether a list has a column of costs, the same on each of its pages."""
    if any(each.cost_cents or each.price_cents_per_hour for each in page.jobs):
        return True
    return page.total > len(page.jobs) and is_any_priced(db, project=page.project)


def line(db: Database, row: JobRow) -> JobLine:
    """One job as a line of the list, without its cost."""
    return _line(row, events.last_data(db, [row.id], phase="STEP").get(row.id, {}), Figures())


def lines(db: Database, rows: Sequence[JobRow], *, now: datetime) -> tuple[JobLine, ...]:
    """Jobs as lines of the list: a handful of queries for all of them."""
    steps = events.last_data(db, [row.id for row in rows], phase="STEP")
    costs, machines = figures(db, rows, now=now), list_machines(db, [row.id for row in rows])
    prices = list_prices(db, [row.id for row in rows])
    origins = audit.list_origins(db, [row.id for row in rows])
    return tuple(
        _line(
            row,
            steps.get(row.id, {}),
            costs[row.id],
            machines=machines.get(row.id, ()),
            price_cents_per_hour=prices[row.id].cents_per_hour,
            again_of=origins.get(row.id),
        )
        for row in rows
    )


def _render_cursor(row: JobRow) -> str:
    return f"{(row.created_at - _EPOCH) // timedelta(microseconds=1)}:{row.id}"


def _parse_cursor(text: str) -> tuple[datetime, str]:
    created, _, job_id = text.partition(":")
    return _EPOCH + timedelta(microseconds=int(created)), job_id


def _line(row: JobRow, data: Mapping[str, Any], cost: Figures, **more: Any) -> JobLine:
    step, steps = whole(data, "step"), row.spec.train.steps if row.spec.train else None
    return fill(
        JobLine,
        row,
        target=row.spec.target,
        step=step,
        steps=steps,
        progress=progress(step, steps),
        loss=number(data, "loss"),
        loss_text=sick_text(data, "loss"),
        resume_from=row.spec.resume_from,
        tokens_per_s=number(data, "tokens_per_s"),
        cost_cents=cost.so_far,
        forecast_cents=cost.at_end,
        forecast_bound=cost.bound,
        uuid=row.id,
        project_id=row.project,
        completed_at=row.ended_at,
        **{"machines": (), "price_cents_per_hour": None, "again_of": None, **more},
    )
