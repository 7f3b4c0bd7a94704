"""Cache of job pages: of running jobs only new events are read, of final jobs only the job that continues it."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import UTC, datetime

from trainmaster.api.jobs import JobPage
from trainmaster.pages import job
from trainmaster.pages.parts.run_summary import RunSummary
from trainmaster.store.database import Database
from trainmaster.store.page_rows import figures
from trainmaster.store.page_rows.runs import find_in_run
from trainmaster.web.beside import Beside

_KEPT = 1024  # summaries of running jobs, up to 30 KB each; least recently used first out
_SMALL = 2 << 20  # bytes of events that are read while the caller waits
_SAMPLES = 150  # steps of an attempt that a first look is drawn from; the whole takes its place in seconds
_RANK = 1  # behind the curves, which are what a page is opened for
_FINAL_KEPT = 64  # pages of final jobs, some hundred kilobytes each


@dataclass(slots=True)
class _RunningSummary:
    summary: RunSummary = field(default_factory=RunSummary)
    lock: threading.Lock = field(default_factory=threading.Lock)
    whole: bool = False  # read to its end at least once


class PageCache:
    """Summaries of running jobs and pages of final ones. Threads may share it."""

    def __init__(self, db: Database, beside: Beside) -> None:
        self._db, self._beside = db, beside
        self._held: OrderedDict[str, _RunningSummary] = OrderedDict()
        self._final: OrderedDict[str, JobPage] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, job_id: str) -> JobPage | None:
        with self._lock:
            final = self._final.get(job_id)
            if final is not None:
                self._final.move_to_end(job_id)
        if final is not None:
            # A final job does not change, but it can be resumed after its page was read.
            following = find_in_run(self._db, job_id, later=True)
            return dataclasses.replace(final, made_at=datetime.now(UTC), continued_as=following)
        held = self._take(job_id)
        with held.lock:
            whole = held.summary.cursor is None  # this read starts at the first event
            page = job.read(self._db, job_id, summary=held.summary)
            held.whole = True
        if page is not None and not page.status.final:
            return page
        with self._lock:
            self._held.pop(job_id, None)
        # The page of a final job is read from the first event, not from the incremental summary.
        page = page if whole or page is None else job.read(self._db, job_id)
        if page is not None and page.status.final:
            with self._lock:
                self._final[job_id] = page
                while len(self._final) > _FINAL_KEPT:
                    self._final.popitem(last=False)
        return page

    def glance(self, job_id: str) -> tuple[JobPage | None, bool]:
        """The page, and whether every event is in it. A long run that was not read yet is sampled: it is read beside.

        All that a page says of checks, checkpoints and attempts is whole in either case; curves are of some hundred
        steps, and counts of steps are missing until then.
        """
        with self._lock:
            known = job_id in self._final or ((held := self._held.get(job_id)) is not None and held.whole)
        key = ("page", job_id)
        if known or (not self._beside.is_asked(key) and figures.measure_events(self._db, job_id) <= _SMALL):
            return self.read(job_id), True
        self._beside.ask(key, lambda: self.read(job_id), rank=_RANK)
        summary = RunSummary()
        for row in figures.sample_events(self._db, job_id, count=_SAMPLES):
            summary.add(row)
        return job.read(self._db, job_id, summary=summary, scan=False), False

    def _take(self, job_id: str) -> _RunningSummary:
        with self._lock:
            held = self._held.setdefault(job_id, _RunningSummary())
            self._held.move_to_end(job_id)
            while len(self._held) > _KEPT:
                self._held.popitem(last=False)
            return held
