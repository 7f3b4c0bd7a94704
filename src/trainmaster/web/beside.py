"""Work beside the requests: what a page does not wait for is read a moment later, one thing at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable

# The first page of a long run, its scripts and its curves are answered within this: a reader that begins at once
# competes with all of them for the interpreter.
WAIT_S = 1.0
_log = logging.getLogger(__name__)


class Beside:
    """One thread that reads what it is asked for, the lowest rank first. Threads may share it."""

    def __init__(self, *, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._waiting: dict[Hashable, tuple[int, float, Callable[[], object]]] = {}  # rank, not before, work
        self._doing: Hashable | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def ask(self, key: Hashable, work: Callable[[], object], *, rank: int) -> None:
        """Have this done; nothing happens where the same is waiting or being done."""
        with self._lock:
            if key in self._waiting or key == self._doing:
                return
            self._waiting[key] = (rank, time.monotonic() + self._wait_s, work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="beside", daemon=True)
                self._thread.start()

    def is_asked(self, key: Hashable) -> bool:
        """Whether it is waiting or being done."""
        with self._lock:
            return key in self._waiting or key == self._doing

    def _run(self) -> None:
        while True:
            with self._lock:
                self._doing = None
                if not self._waiting:
                    self._thread = None
                    return
                now = time.monotonic()
                due = [key for key, (_, at, _) in self._waiting.items() if at <= now]
                rest_s = min(at for _, at, _ in self._waiting.values()) - now
                if due:
                    self._doing = min(due, key=lambda key: self._waiting[key][0])
                    work = self._waiting.pop(self._doing)[2]
            if not due:
                time.sleep(max(0.0, rest_s))
                continue
            try:
                work()
            except Exception:  # the database may be away: the next look at the page asks again
                _log.warning("%s could not be read", self._doing, exc_info=True)
