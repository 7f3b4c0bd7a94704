"""Job pages without reading all events again: of jobs that run only what is new is read, of final ones nothing."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import UTC, datetime

from trainmaster.api.jobs import JobPage
from trainmaster.pages import job
from trainmaster.pages.parts.run_summary import RunSummary
from trainmaster.store import Database

_KEPT = 1024  # jobs watched at once, at most some 30 KB each; one more is read from its start
_FINAL_KEPT = 64  # pages of final jobs, some hundred kilobytes each: nothing about them changes any more


@dataclass(slots=True)
class _Held:
    summary: RunSummary = field(default_factory=RunSummary)
    lock: threading.Lock = field(default_factory=threading.Lock)


class LivePages:
    """Keeps what the events of a watched job came to, and adds only the new ones. Shared by the server's threads."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._final: OrderedDict[str, JobPage] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, job_id: str) -> JobPage | None:
        with self._lock:
            final = self._final.get(job_id)
            if final is not None:
                self._final.move_to_end(job_id)
                return dataclasses.replace(final, made_at=datetime.now(UTC))
        held = self._take(job_id)
        with held.lock:
            whole = held.summary.cursor is None  # nothing was gathered yet: this read begins at the first event
            page = job.read(self._db, job_id, summary=held.summary)
        if page is not None and not page.status.final:
            return page
        with self._lock:
            self._held.pop(job_id, None)
        # The last word on a job is read whole from the database, not from what was gathered on the way.
        page = page if whole or page is None else job.read(self._db, job_id)
        if page is not None and page.status.final:
            with self._lock:
                self._final[job_id] = page
                while len(self._final) > _FINAL_KEPT:
                    self._final.popitem(last=False)
        return page

    def _take(self, job_id: str) -> _Held:
        with self._lock:
            held = self._held.setdefault(job_id, _Held())
            self._held.move_to_end(job_id)
            while len(self._held) > _KEPT:
                self._held.popitem(last=False)
            return held
