"""What jobs or projects cost in a month as CSV: all of them, a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from trainmaster import targets
from trainmaster.api.costs import Each
from trainmaster.core.clean_text import cell, csv_lines
from trainmaster.core.money.cost import Amount, month_of, submitter
from trainmaster.store import costs
from trainmaster.store.database import Database
from trainmaster.store.page_rows import cost_rows
from trainmaster.store.page_rows.kept_sums import Recall

_SUMS = ("project", "person", "target", "status", "attempts", "gpu_hours", "cost_usd", "attempts_without_price")
_JOBS = ("project", "person", "target", "job", "id", "status", "reason", *_SUMS[4:])


def read(
    db: Database, *, each: Each = "jobs", project: str | None = None, month: datetime | None = None,
    now: datetime | None = None,
) -> Iterator[str]:  # fmt: skip
    """A line for each job; of projects one for each person, target and status. GPU hours are those that were held.

    `cost_usd` is what is known, and empty where nothing is.
    """
    now = now or datetime.now(UTC)
    return csv_lines(_list_jobs(db, project, month, now) if each == "jobs" else _list_sums(db, project, month, now))


def _list_jobs(db: Database, project: str | None, month: datetime | None, now: datetime) -> Iterator[list[Any]]:
    window = month_of(month) if month is not None else None
    yield [_JOBS]
    for batch in cost_rows.scan_jobs(db, project=project, window=window, free=_list_free(), now=now):
        yield [
            (
                *_whose(row.project, row.person, row.target), cell(row.name), row.id, row.status.value,
                row.reason or "", row.attempts, *_figures(row.gpu_hours, row.amount),
            )
            for row in batch
        ]  # fmt: skip


def _list_sums(db: Database, project: str | None, month: datetime | None, now: datetime) -> Iterator[list[Any]]:
    window = month_of(month) if month is not None else None
    with db.read() as conn:
        charges = costs.list_charges(conn, project=project, closed=False)
        (groups,) = costs.sum_groups(
            conn, charges, project=project, free=_list_free(), now=now, windows=[window], recall=Recall(db, conn)
        )
    groups.sort(key=lambda group: (group.project, group.person or "", group.target, group.status))
    yield [_SUMS]
    yield [
        (
            *_whose(group.project, group.person, group.target),
            "ended by a limit" if group.limited else group.status, group.attempts,
            *_figures(group.gpu_hours, group.amount),
        )
        for group in groups
    ]  # fmt: skip


def _list_free() -> list[str]:
    return [name for name in targets.names() if targets.is_free(name)]


def _whose(project: str, person: str | None, target: str) -> tuple[str, str, str]:
    return cell(project), cell(submitter(person)), cell(targets.split(target)[1])


def _figures(gpu_hours: float, amount: Amount) -> tuple[float, float | str, int]:
    known = "" if amount.unknown and not amount.known_cents else round(amount.known_cents / 100, 6)
    return round(gpu_hours, 6), known, amount.unknown
