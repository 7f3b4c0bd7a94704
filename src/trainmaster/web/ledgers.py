"""Ledgers that the server keeps: of jobs whose page is open, and the sums that /metrics shows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from trainmaster.api.goodput import JobGoodput
from trainmaster.api.timeline import Timeline
from trainmaster.core.money.goodput.tally import Tally
from trainmaster.pages import timeline
from trainmaster.pages.goodput import job_goodput, kind_of, list_booked
from trainmaster.pages.job_goodput import book_job
from trainmaster.store.database import Database
from trainmaster.store.page_rows import figures
from trainmaster.web.beside import Beside

_KEPT = 256  # ledgers of pages
_FRESH_S = 10.0  # a ledger is made again when it is older than this, and
_SHARE = 20  # than so many times what making it took: a long run does not keep a core busy with its page
_SMALL = 2 << 20  # bytes of events whose ledger is made while the caller waits
_RANK = 2  # the longest of what is read beside a page
_SUMS_FRESH_S = 60.0
_LOOK_S = 0.5
MOST_PROJECTS = 20  # with labels of their own; the others are one, or series would grow with every name a user writes
OTHERS = "(other)"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """GPU-time and money of all jobs, by project and by target."""

    projects: Mapping[str, Tally]
    targets: Mapping[str, Tally]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """What one ledger gave, when it was made and how long that took."""

    goodput: JobGoodput
    timeline: Timeline
    at: float
    took_s: float

    def is_fresh(self) -> bool:
        """Whether it is some seconds old at most, or of a job that is over."""
        return self.goodput.status.final or time.monotonic() - self.at < max(_FRESH_S, _SHARE * self.took_s)


@dataclass(slots=True)
class _Running:
    """The sums of jobs that are final, which no longer change, and which jobs they are."""

    counted: set[str] = field(default_factory=set)
    tops: dict[str, int] = field(default_factory=dict)  # by run, the highest step of its final jobs
    projects: dict[str, Tally] = field(default_factory=dict)
    targets: dict[str, Tally] = field(default_factory=dict)


class Ledgers:
    """Ledgers by job, and sums. Threads may share it."""

    def __init__(self, db: Database, beside: Beside) -> None:
        self._db, self._beside = db, beside
        self._pages: OrderedDict[str, _Kept] = OrderedDict()
        self._lock = threading.Lock()
        self._final = _Running()
        self._sums: Sums | None = None
        self._wanted = False

    def glance(self, job_id: str) -> tuple[JobGoodput | None, bool]:
        """The ledger if it is made, however old, and whether it is as new as it should be; else it is made beside.

        That of a run of 100,000 steps takes seconds, and its page must not wait for it.
        """
        kept, fresh = self._look(job_id)
        return (kept.goodput if kept is not None else None), fresh

    def timeline(self, job_id: str) -> tuple[Timeline | None, bool]:
        """The same for the timeline, which is made from the ledger."""
        kept, fresh = self._look(job_id)
        return (kept.timeline if kept is not None else None), fresh

    def _look(self, job_id: str) -> tuple[_Kept | None, bool]:
        with self._lock:
            kept = self._pages.get(job_id)
            if kept is not None and kept.is_fresh():
                self._pages.move_to_end(job_id)
                return kept, True
        key = ("ledger", job_id)
        if not self._beside.is_asked(key) and figures.measure_events(self._db, job_id) <= _SMALL:
            return self._make(job_id), True
        self._beside.ask(key, lambda: self._make(job_id), rank=_RANK)
        return kept, False

    def _make(self, job_id: str) -> _Kept | None:
        begun, now = time.monotonic(), datetime.now(UTC)
        with self._db.read() as conn:
            booked = book_job(self._db, job_id, now=now)
            if booked is None:
                return None
            made = timeline.build(conn, booked, now=now)
        at = time.monotonic()
        kept = _Kept(goodput=job_goodput(booked), timeline=made, at=at, took_s=at - begun)
        with self._lock:
            self._pages[job_id] = kept
            while len(self._pages) > _KEPT:
                self._pages.popitem(last=False)
        return kept

    def sums(self) -> Sums | None:
        """The sums for /metrics, a minute old or so; None until they were made once. Asking has them made (`run`)."""
        self._wanted = True
        return self._sums

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the sums fresh while they are asked for, until `stop`.

        Beside the requests: the first pass over a large database takes longer than a scrape may.
        """
        made_at = -_SUMS_FRESH_S
        while not stop.is_set():
            if self._wanted and time.monotonic() - made_at > _SUMS_FRESH_S:
                self._wanted, made_at = False, time.monotonic()
                try:
                    await asyncio.to_thread(self.refresh, stop)
                except Exception:  # the database may be away: the last sums stand, and the next scrape asks again
                    _log.warning("the sums of the goodput ledger could not be made", exc_info=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _LOOK_S)

    def refresh(self, stop: asyncio.Event | None = None) -> None:
        """Make the sums anew. Final jobs are read once, then only their sum is kept."""
        final = self._final
        projects = {name: _copy(tally) for name, tally in final.projects.items()}
        targets = {name: _copy(tally) for name, tally in final.targets.items()}
        with self._db.read() as conn:
            tops = dict(final.tops)
            for booked in list_booked(conn, now=datetime.now(UTC), without=final.counted, tops=tops):
                if stop is not None and stop.is_set():
                    return
                job, tally = booked.job, booked.tally
                kind = kind_of(job.target)
                for sums, name in ((projects, job.project), (targets, kind)):
                    sums.setdefault(name, Tally()).add(tally)
                if job.status.final:
                    final.counted.add(job.id)
                    if booked.ledger.steps:
                        final.tops[job.run] = booked.ledger.steps
                    for kept, name in ((final.projects, job.project), (final.targets, kind)):
                        kept.setdefault(name, Tally()).add(tally)
        self._sums = Sums(projects=_bounded(projects), targets=targets)


def _bounded(sums: Mapping[str, Tally]) -> dict[str, Tally]:
    """The projects with the most GPU-time by name, the rest together."""
    names = sorted(sums, key=lambda name: (-sums[name].total_us, name))
    bounded = {name: sums[name] for name in names[:MOST_PROJECTS]}
    for name in names[MOST_PROJECTS:]:
        bounded.setdefault(OTHERS, Tally()).add(sums[name])
    return bounded


def _copy(tally: Tally) -> Tally:
    copied = Tally()
    copied.add(tally)
    return copied
