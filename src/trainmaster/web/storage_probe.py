"""Storage health for /readyz: whether the storage takes, returns and removes a file."""

from __future__ import annotations

import threading
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor

from trainmaster.core.errors import StorageError
from trainmaster.storage import Store

_EVERY_S = 15.0  # a load balancer polls more often; an object store bills each request
_TIMEOUT_S = 5.0


class StorageProbe:
    """A write, a read and a removal of one small file, at most every 15 s. Threads may share it."""

    def __init__(self, storage: Store, *, every_s: float = _EVERY_S, timeout_s: float = _TIMEOUT_S) -> None:
        self._storage, self._every_s, self._timeout_s = storage, every_s, timeout_s
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="storage-probe")
        self._lock = threading.Lock()
        self._probed: float | None = None
        self._running: Future[str | None] | None = None
        self._fault: str | None = None

    def find_fault(self) -> str | None:
        """Why the storage cannot be used; None if it can."""
        with self._lock:
            if self._probed is not None and time.monotonic() - self._probed < self._every_s:
                return self._fault
            if self._running is None:  # else an earlier probe still hangs in its thread: do not start another
                self._running = self._pool.submit(self._probe)
            try:
                self._fault = self._running.result(timeout=self._timeout_s)
                self._running = None
            except TimeoutError:
                self._fault = f"the storage did not answer within {self._timeout_s:g} s"
            self._probed = time.monotonic()
            return self._fault

    def _probe(self) -> str | None:
        path, data = f"health/{uuid.uuid4()}", b"probe"
        try:
            self._storage.put(path, data)
            stored = self._storage.get(path)
            self._storage.delete(path)
        except (StorageError, OSError) as error:
            return f"the storage cannot be used: {error}"
        return None if stored == data else "the storage returned other bytes than were written"
