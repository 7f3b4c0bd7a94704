"""Curves of comparisons, as JSON: those of final jobs are kept, those of running jobs for some seconds."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict

from trainmaster.api.codec import to_json
from trainmaster.pages import compare
from trainmaster.store.database import Database

_FRESH_S = 10.0  # of a running job
_KEPT = 2000  # some 6 KB each


class ComparedCurves:
    """Sampled curves by job, metric and number of points. Threads may share it."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._kept: OrderedDict[tuple[str, str, int], tuple[str, float]] = OrderedDict()  # with until when
        self._lock = threading.Lock()

    def read(self, job_id: str, *, metric: str, points: int, final: bool) -> str:
        key = (job_id, metric, points)
        with self._lock:
            text, until = self._kept.get(key, ("", 0.0))
            if time.monotonic() < until:
                self._kept.move_to_end(key)
                return text
        text = to_json(compare.read_curve(self._db, job_id, metric=metric, points=points))
        with self._lock:
            self._kept[key] = (text, math.inf if final else time.monotonic() + _FRESH_S)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return text
