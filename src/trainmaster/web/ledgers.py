"""Ledgers that the server keeps: of jobs whose page is open, and the sums and counts that /metrics shows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from trainmaster.api.goodput import JobGoodput
from trainmaster.api.timeline import Timeline
from trainmaster.core.money.goodput.tally import Tally
from trainmaster.pages import timeline
from trainmaster.pages.goodput import job_goodput, kind_of, list_booked
from trainmaster.pages.job_goodput import book_job
from trainmaster.pages.parts import machine_counts
from trainmaster.pages.parts.machine_counts import MachineCounts
from trainmaster.store.database import Database
from trainmaster.store.page_rows import figures, ledger_tallies
from trainmaster.web.beside import Beside

_KEPT = 256  # ledgers of pages
_FRESH_S = 10.0  # a ledger is made again when it is older than this, and
_SHARE = 20  # than so many times what making it took: a long run does not keep a core busy with its page
_SMALL = 2 << 20  # bytes of events whose ledger is made while the caller waits
_RANK = 2  # the longest of what is read beside a page
_SUMS_FRESH_S = 60.0
_MACHINES_FRESH_S = 20.0
_RECENT_S = 30.0  # what a page may show as the present
_PATIENCE_S = 0.1  # that a page waits for sums to be made: of a few running jobs they take less
_LOOK_S = 0.5
_AT_ONCE = 20  # final jobs whose tallies are made in one read and stored
_REST_S = 1.0
MOST_PROJECTS = 20  # with labels of their own; the others are one, or series would grow with every name a user writes
OTHERS = "(other)"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """GPU-time and money of all jobs, by project and by target."""

    projects: Mapping[str, Tally]
    targets: Mapping[str, Tally]
    made_at: datetime


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
class _Final:
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
        self._final = _Final()
        self._sums: Sums | None = None
        self._wanted = False
        self._took_s = 0.0
        self._begun_at = math.inf  # of the pass that goes on
        self._made = threading.Condition()
        self._wake: Callable[[], object] | None = None  # while `run` goes on

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
        """The sums for /metrics; None until they were made once. Asking has them made (`run`).

        A minute old, or 20 times what making them takes: that is the events of all open jobs.
        """
        self._wanted = True
        return self._sums

    def recent(self) -> Sums | None:
        """The sums, half a minute old at most, for a page; None where making them takes longer than a page may wait.

        They may be as old as the last look at them, which is hours for a page that is opened once a day.
        """
        self._wanted = True
        if not self._is_recent() and self._wake is not None:
            self._wake()
            # Of a pass that has taken longer than that already, each page would wait in vain.
            with self._made:
                if time.monotonic() - self._begun_at > _PATIENCE_S:
                    return None
                self._made.wait_for(self._is_recent, _PATIENCE_S)
        return self._sums if self._is_recent() else None

    def _is_recent(self) -> bool:
        age_s = (datetime.now(UTC) - self._sums.made_at).total_seconds() if self._sums is not None else math.inf
        return age_s < max(_RECENT_S, _SHARE * self._took_s)

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the sums fresh while they are asked for, until `stop`.

        Beside the requests: the first pass over a large database takes longer than a scrape may.
        """
        wake, due = asyncio.Event(), -math.inf
        loop, stopped = asyncio.get_running_loop(), asyncio.ensure_future(stop.wait())
        self._wake = lambda: loop.call_soon_threadsafe(wake.set)
        while not stop.is_set():
            asked = wake.is_set() and not self._is_recent()
            wake.clear()
            if asked or (self._wanted and time.monotonic() > due):
                self._wanted = False
                self._begun_at = begun = time.monotonic()
                try:
                    await asyncio.to_thread(self.refresh, stop)
                except Exception:  # the database may be away: the last sums stand, and the next scrape asks again
                    _log.warning("the sums of the goodput ledger could not be made", exc_info=True)
                self._took_s, self._begun_at = time.monotonic() - begun, math.inf
                due = begun + max(_SUMS_FRESH_S, _SHARE * self._took_s)
                with self._made:
                    self._made.notify_all()
            woken = asyncio.ensure_future(wake.wait())
            await asyncio.wait((stopped, woken), timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            woken.cancel()
        self._wake = None
        stopped.cancel()

    def refresh(self, stop: asyncio.Event | None = None) -> None:
        """Make the sums anew. The events of a final job are read once: what its ledger came to is stored."""
        now, final = datetime.now(UTC), self._final
        with self._db.read() as conn:
            missing = ledger_tallies.list_missing(conn)
        self._count_final()
        for first in range(0, len(missing), _AT_ONCE):
            if stop is not None and stop.is_set():
                return
            begun = time.monotonic()
            self._keep(missing[first : first + _AT_ONCE], now)
            self._count_final()
            if missing[first + _AT_ONCE :]:  # a first pass over millions of events leaves half of the time to requests
                time.sleep(min(_REST_S, time.monotonic() - begun))
        projects = {name: _copy(tally) for name, tally in final.projects.items()}
        targets = {name: _copy(tally) for name, tally in final.targets.items()}
        with self._db.read() as conn:
            for booked in list_booked(conn, now=datetime.now(UTC), only_open=True, tops=dict(final.tops)):
                _add(projects, targets, booked.job.project, booked.job.target, booked.tally)
        self._sums = Sums(projects=_bounded(projects), targets=targets, made_at=datetime.now(UTC))

    def _keep(self, ids: Sequence[str], now: datetime) -> None:
        with self._db.read() as conn:
            booked = list_booked(conn, jobs=ids, now=now, tops=dict(self._final.tops))
            made = [(of.job.id, of.ledger.steps, of.tally) for of in booked]
        with self._db.write() as conn:
            ledger_tallies.keep(conn, made)

    def _count_final(self) -> None:
        """Add the stored tallies that are not in the sums yet, of this server and of others."""
        final = self._final
        with self._db.read() as conn:
            new = ledger_tallies.list_kept(conn) - final.counted
            for kept in ledger_tallies.read(conn, new):
                final.counted.add(kept.job_id)
                final.tops[kept.run] = max(kept.steps, final.tops.get(kept.run, 0))
                _add(final.projects, final.targets, kept.project, kept.target, kept.tally)


class MachineSums:
    """Counts of nodes and devices for /metrics. Threads may share it."""

    def __init__(self, db: Database, home: Path) -> None:
        self._db, self._home = db, home
        self._counts: MachineCounts | None = None
        self._wanted = False

    def read(self) -> MachineCounts | None:
        """The counts as they were made last; None until they were made once. Asking has them made (`run`)."""
        self._wanted = True
        return self._counts

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the counts fresh while they are asked for, until `stop`: a scrape does not wait for them."""
        due = -math.inf
        while not stop.is_set():
            if self._wanted and time.monotonic() > due:
                self._wanted, begun = False, time.monotonic()
                try:
                    await asyncio.to_thread(self.refresh)
                except Exception:  # the database may be away: the last counts stand, and the next scrape asks again
                    _log.warning("nodes and devices could not be counted", exc_info=True)
                due = begun + max(_MACHINES_FRESH_S, _SHARE * (time.monotonic() - begun))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _LOOK_S)

    def refresh(self) -> None:
        """Make the counts anew."""
        self._counts = machine_counts.read(self._db, home=self._home)


def _add(projects: dict[str, Tally], targets: dict[str, Tally], project: str, target: str, tally: Tally) -> None:
    for sums, name in ((projects, project), (targets, kind_of(target))):
        sums.setdefault(name, Tally()).add(tally)


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
