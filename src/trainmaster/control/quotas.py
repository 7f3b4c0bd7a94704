"""What a job may leave on the disk of the server: a quota, and room that stays free for the database and other jobs.

Of files only where they are kept in a folder of this machine: an object store has limits of its own. Of events always:
they are rows of the database.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from trainmaster.core.errors import TargetError, UsageError
from trainmaster.storage import Store

VARIABLE, DEFAULT_GIB = "TRAINMASTER_JOB_QUOTA_GIB", 500.0
EVENTS_VARIABLE, EVENTS_DEFAULT_GIB = "TRAINMASTER_EVENTS_QUOTA_GIB", 4.0  # 5 million steps of our trainer
_ROOM_BYTES = 256 << 20  # that stays free on the disk, or a twentieth of a smaller one
_GIB = 2**30


@dataclass(slots=True, kw_only=True)
class Quota:
    """Counts what is stored of one job; None: without a limit."""

    folder: Path | None
    limit_bytes: float | None
    stored_bytes: int

    def take(self, size_bytes: int) -> None:
        """Count a file that is about to be stored; TargetError where there is no room for it."""
        if self.limit_bytes is not None and self.stored_bytes + size_bytes > self.limit_bytes:
            raise TargetError(f"over the {self.limit_bytes / _GIB:g} GiB that a job may leave here ({VARIABLE})")
        self.require_room()
        self.stored_bytes += size_bytes

    def require_room(self) -> None:
        """TargetError where what is free is kept for the database. Asked again during a copy: a file may have holes."""
        if self.folder is None:
            return
        disk = os.statvfs(self.folder)
        free, room = disk.f_bavail * disk.f_frsize, min(_ROOM_BYTES, disk.f_blocks * disk.f_frsize // 20)
        if free < room:
            words = f"the server's disk has {free:,} bytes free, and {room:,} are kept for its database"
            raise TargetError(f"{words}; free some, or delete jobs")


def open_quota(storage: Store, stored_bytes: int) -> Quota:
    """The quota of a job of which so many bytes are stored already."""
    if "://" in storage.url and not storage.url.startswith("file://"):
        return Quota(folder=None, limit_bytes=None, stored_bytes=stored_bytes)
    folder = Path(storage.url.removeprefix("file://"))
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    return Quota(folder=existing, limit_bytes=read_limit(os.environ.get(VARIABLE)), stored_bytes=stored_bytes)


def read_events_limit() -> float:
    """Bytes that the events of one job may take in the database."""
    return read_limit(os.environ.get(EVENTS_VARIABLE), variable=EVENTS_VARIABLE, default=EVENTS_DEFAULT_GIB)


def read_limit(text: str | None, *, variable: str = VARIABLE, default: float = DEFAULT_GIB) -> float:
    """Bytes from the environment. UsageError if it is no positive number."""
    try:
        gib = float(text) if text else default
    except ValueError:
        gib = 0.0
    if not 0 < gib < 1e9:
        raise UsageError(f"{variable}: {text!r} is no number of GiB; write for example {default:g}, or unset it")
    return gib * _GIB
