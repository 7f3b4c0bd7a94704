"""What the GPUs did: sums over jobs by project, target and month, and the jobs that lost the most GPU-time."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from trainmaster import targets
from trainmaster.api.codec import fill
from trainmaster.api.goodput import BinLine, Goodput, GoodputPage, GoodputSum, JobGoodput
from trainmaster.core.money.cost import Window, month_of
from trainmaster.core.money.goodput.bins import Bin
from trainmaster.core.money.goodput.history import to_us
from trainmaster.core.money.goodput.ledger import Ledger, book
from trainmaster.core.money.goodput.tally import Tally, fold
from trainmaster.store import goodput
from trainmaster.store.database import Connection, Database
from trainmaster.store.goodput import JobHistory

MOST = 200  # jobs on one page
_HOUR_US = 3_600_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Booked:
    """One job with its ledger, and its tallies by month."""

    job: JobHistory
    ledger: Ledger
    months: dict[str, Tally]

    @property
    def tally(self) -> Tally:
        whole = Tally()
        for tally in self.months.values():
            whole.add(tally)
        whole.jobs, whole.unpriced_jobs = 1, int(not self.job.priced)
        return whole


def read(
    db: Database,
    *,
    project: str | None = None,
    month: datetime | None = None,
    limit: int = 20,
    now: datetime | None = None,
) -> GoodputPage:
    """The page of a project or of all, in the month that a time is in or from the beginning."""
    now = now or datetime.now(UTC)
    window = month_of(month) if month is not None else None
    name = f"{window.start:%Y-%m}" if window is not None else None
    total = Tally()
    by_project: defaultdict[str, Tally] = defaultdict(Tally)
    by_target: defaultdict[str, Tally] = defaultdict(Tally)
    by_month: defaultdict[str, Tally] = defaultdict(Tally)
    most = max(1, min(limit, MOST))
    worst: list[tuple[int, str, JobGoodput]] = []
    jobs = 0
    with db.read() as conn:
        for booked in list_booked(conn, project=project, window=window, now=now):
            tally = booked.tally
            if not booked.months:
                continue
            jobs += 1
            total.add(tally)
            by_project[booked.job.project].add(tally)
            by_target[kind_of(booked.job.target)].add(tally)
            for when, part in booked.months.items():
                by_month[when].add(part)
            rank = (tally.total_us - tally.productive_us, booked.job.id)
            if len(worst) < most:
                heapq.heappush(worst, (*rank, job_goodput(booked, month=name)))
            elif rank > worst[0][:2]:
                heapq.heapreplace(worst, (*rank, job_goodput(booked, month=name)))
    listed = [entry[2] for entry in sorted(worst, key=lambda entry: entry[:2], reverse=True)]
    return GoodputPage(
        month=name,
        project=project,
        total=_sum("all", total),
        projects=_sums(by_project),
        targets=_sums(by_target),
        months=_sums(by_month),
        jobs=tuple(listed),
        more=jobs - len(listed),
        made_at=now,
    )


def list_booked(
    conn: Connection,
    *,
    jobs: Collection[str] = (),
    project: str | None = None,
    window: Window | None = None,
    now: datetime,
    only_open: bool = False,
    tops: dict[str, int] | None = None,
) -> Iterator[Booked]:
    """Ledgers of these jobs, of a project or of all, in one pass. With a window, tallies of its month alone.

    `tops`: by run, the highest step that jobs left out have trained; those of the jobs read are added to it.
    """
    month = f"{window.start:%Y-%m}" if window is not None else None
    free = [name for name in targets.names() if targets.is_free(name)]
    now_us = to_us(now)
    tops = {} if tops is None else tops
    for job in goodput.list_histories(conn, jobs=jobs, project=project, window=window, free=free, only_open=only_open):
        # What an earlier job of the same run has trained is repeated work in a later one.
        ledger = book(replace(job.history, steps_before=tops.get(job.run, 0)), now=now_us)
        tops[job.run] = ledger.steps
        months = fold(ledger, charges=job.charges, priced=job.priced, now=now, month=month)
        yield Booked(job=job, ledger=ledger, months=months)


def job_goodput(booked: Booked, *, month: str | None = None) -> JobGoodput:
    """One job as the pages show it."""
    job, ledger = booked.job, booked.ledger
    notes = list(ledger.notes)
    if not job.priced:
        notes.append("no money: no price is known (resources.price_per_hour in the spec, or the target's)")
    return fill(
        JobGoodput,
        job,
        gpus=ledger.gpus,
        month=month,
        started_at=moment_of(ledger.start),
        ended_at=moment_of(ledger.end),
        goodput=shape(booked.tally),
        notes=tuple(notes),
    )


def moment_of(us: int) -> datetime:
    """A time of the ledger."""
    return _EPOCH + timedelta(microseconds=us)


def shape(tally: Tally) -> Goodput:
    """A tally as an answer."""
    whole = tally.total_us
    priced = tally.jobs > tally.unpriced_jobs
    bins = tuple(
        BinLine(
            bin=bin_.value,
            gpu_us=us,
            gpu_hours=us / _HOUR_US,
            share=us / whole if whole else 0.0,
            cents=tally.cents[bin_] if priced else None,
        )
        for bin_, us in tally.gpu_us.items()
    )
    cents = sum(tally.cents[bin_] for bin_ in Bin) if priced else None
    return fill(Goodput, tally, bins=bins, gpu_us=whole, gpu_hours=whole / _HOUR_US, cents=cents)


def kind_of(target: str) -> str:
    """The kind of a target, without account and option: `ssh` of `me@ssh:hosts.yaml`."""
    return targets.split(target)[1]


def _sums(tallies: Mapping[str, Tally]) -> tuple[GoodputSum, ...]:
    return tuple(_sum(name, tallies[name]) for name in sorted(tallies))


def _sum(name: str, tally: Tally) -> GoodputSum:
    return GoodputSum(name=name, jobs=tally.jobs, goodput=shape(tally))
