"""Columns of the runs whose curves are open: read once, then only what is new. A long run is sampled meanwhile."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from trainmaster.api.curves import Axis, CurvesPage
from trainmaster.pages.parts.columns import Columns
from trainmaster.store.database import Database
from trainmaster.store.page_rows import figures
from trainmaster.web.beside import Beside

_MOST_BYTES = 192 << 20  # of all columns; a run of 100,000 steps with a dozen metrics has 7 MB
SMALL = 2 << 20  # bytes of events that are read while the caller waits: a tenth of a second
_BATCH = 5_000
_SAMPLES = 700
_RANK = 0


@dataclass(slots=True)
class _Kept:
    columns: Columns = field(default_factory=Columns)
    lock: threading.Lock = field(default_factory=threading.Lock)
    whole: bool = False  # read to its end at least once


class CurveCache:
    """Curves by job. Threads may share it."""

    def __init__(self, db: Database, beside: Beside) -> None:
        self._db, self._beside = db, beside
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._lock = threading.Lock()

    def read(
        self,
        job_id: str,
        metrics: list[str],
        *,
        axis: Axis = "step",
        low: float | None = None,
        high: float | None = None,
        points: int = 1000,
    ) -> CurvesPage:
        """Curves of a job; a sample of a long run that is not read yet, whose reading then begins."""
        kept = self._take(job_id)
        if not kept.whole and figures.measure_events(self._db, job_id) > SMALL:
            self._beside.ask(("curves", job_id), lambda: self._read_whole(job_id, kept), rank=_RANK)
            sample = Columns()
            for row in figures.sample_steps(self._db, job_id, count=_SAMPLES):
                sample.add(row)
            return sample.window(metrics, axis=axis, low=low, high=high, points=points, sampled=True)
        with kept.lock:
            self._advance(job_id, kept)
            return kept.columns.window(metrics, axis=axis, low=low, high=high, points=points, sampled=False)

    def _take(self, job_id: str) -> _Kept:
        with self._lock:
            kept = self._kept.setdefault(job_id, _Kept())
            self._kept.move_to_end(job_id)
            held = sum(item.columns.size() for item in self._kept.values())
            while held > _MOST_BYTES and len(self._kept) > 1:
                held -= self._kept.popitem(last=False)[1].columns.size()
            return kept

    def _advance(self, job_id: str, kept: _Kept) -> None:
        while rows := figures.scan_figures(self._db, job_id, after=kept.columns.cursor, limit=_BATCH):
            for row in rows:
                kept.columns.add(row)
            if len(rows) < _BATCH:
                break
        kept.whole = True

    def _read_whole(self, job_id: str, kept: _Kept) -> None:
        with kept.lock:
            self._advance(job_id, kept)
