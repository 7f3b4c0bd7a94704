"""Connections of the server: header timeout, idle timeout, and a limit below the descriptor limit.

uvicorn waits for ever for the rest of a request. At the limit the oldest connection without a complete request is
closed for a new one, so that half-open connections cannot keep callers out, and the reconciler keeps descriptors for
its database, its jobs and its files.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import threading
import time
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

if TYPE_CHECKING:
    _Protocol = asyncio.Protocol
else:
    _Protocol = AutoHTTPProtocol

HEADER_S = 10.0  # from the first byte, or from the connection, to the end of the headers
BODY_S = 60.0  # from the end of the headers to the end of the body; bodies have at most 1 MiB
BACKLOG = 128  # connections that one turn of the event loop accepts before any can be closed
RESERVED = 256  # descriptors for the reconciler, the database, log files and storage
_FEWEST = 64


def raise_descriptor_limit() -> int:
    """Raise the soft limit of descriptors to the hard one (at most 65,536); the limit now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return most if soft == resource.RLIM_INFINITY else soft


def connection_limit(descriptors: int) -> int:
    """Connections that leave the reserve free."""
    return max(_FEWEST, descriptors - RESERVED - BACKLOG)


class Connections:
    """The open connections of a server, oldest first."""

    def __init__(self, limit: int, *, header_s: float = HEADER_S, body_s: float = BODY_S) -> None:
        self.limit, self.header_s, self.body_s = limit, header_s, body_s
        self._open: dict[BoundedProtocol, None] = {}

    def add(self, new: BoundedProtocol) -> bool:
        """Register a connection; False where every connection is busy and this one must be closed."""
        if len(self._open) >= self.limit:
            oldest = next((connection for connection in self._open if connection.is_waiting()), None)
            if oldest is None:
                return False
            oldest.abort()
        self._open[new] = None
        return True

    def remove(self, old: BoundedProtocol) -> None:
        self._open.pop(old, None)

    def protocol(self) -> type[BoundedProtocol]:
        """The protocol class for uvicorn's `http` setting."""
        return type("BoundConnections", (BoundedProtocol,), {"bound": self})


class BoundedProtocol(_Protocol):
    """An HTTP connection that is closed when a request takes too long to arrive."""

    bound: Connections
    transport: Any
    cycle: Any
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if not self.bound.add(self):
            self.abort()
            return
        self._watch(self.bound.header_s)

    def data_received(self, data: bytes) -> None:
        if self._timer is None and self.is_waiting():
            self._watch(self.bound.header_s)
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.bound.remove(self)
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def is_waiting(self) -> bool:
        """No complete request is in progress."""
        cycle = getattr(self, "cycle", None)
        return cycle is None or bool(cycle.response_complete)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def _watch(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire, self.cycle)

    def _expire(self, seen: Any) -> None:
        self._timer = None
        cycle = self.cycle
        if cycle is seen:  # no request arrived since
            self.abort()
        elif not cycle.response_complete and cycle.more_body:
            if getattr(self, "_body_since", None) is cycle:
                self.abort()
                return
            self._body_since = cycle
            self._timer = asyncio.get_running_loop().call_later(self.bound.body_s, self._expire, seen)


class BoundedLog(logging.Filter):
    """At most `most` records of one message in `every_s` seconds; the next one after that counts the dropped ones."""

    def __init__(self, *, most: int = 20, every_s: float = 60.0) -> None:
        super().__init__()
        self._most, self._every_s = most, every_s
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        key, now = (record.name, str(record.msg)[:200]), time.monotonic()
        with self._lock:
            if len(self._seen) > 10_000:
                self._seen.clear()
            start, count = self._seen.get(key, (now, 0))
            if now - start >= self._every_s:
                dropped, start, count = count - self._most, now, 0
                if dropped > 0:
                    record.msg = f"{record.msg} ({dropped} more were not logged)"
            self._seen[key] = (start, count + 1)
        return count < self._most


def bound_logs() -> None:
    """Bound the repetition of messages of every handler that writes."""
    bounded = BoundedLog()
    last_resort = [logging.lastResort] if logging.lastResort is not None else []
    named = [handler for name in ("", "uvicorn", "uvicorn.error") for handler in logging.getLogger(name).handlers]
    for handler in {*last_resort, *named}:
        handler.addFilter(bounded)
