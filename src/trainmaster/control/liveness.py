"""Liveness of a reconciler: its token, and a file lock that shows others on this machine at once that it has ended.

The kernel drops a lock with its holder. A process that can lock another's file knows that it has ended, and does not
wait for its leases to expire. For a reconciler on another machine or in another container only the leases count.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

FOLDER = "reconcilers"
_SEEN = "seen"  # its time is when a reconciler of this home last looked at the jobs
_BEAT_S = 5.0


class Liveness:
    """Begins now; ends with `end`, or with the process."""

    def __init__(self, home: Path) -> None:
        self.token = str(uuid.uuid4())
        folder = home / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{self.token}.lock"
        # Close-on-exec, which is Python's default: an agent that inherited it would hold the lock while it runs.
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        self.owner = f"{socket.gethostname()} {self._path}"
        self._beaten_s = 0.0
        self.beat()

    def beat(self) -> None:
        """Note the time, for commands that find no reconciler and say since when the state is unknown."""
        if time.monotonic() - self._beaten_s < _BEAT_S:
            return
        self._beaten_s = time.monotonic()
        with contextlib.suppress(OSError):  # a full disk: the jobs matter more than the note
            (self._path.parent / _SEEN).touch()

    def end(self) -> None:
        self._beaten_s = 0.0
        self.beat()
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def is_alive(home: Path) -> bool:
    """Whether a reconciler on this machine works on this home: the kernel holds the lock of its file."""
    return any(_is_locked(path) for path in (home / FOLDER).glob("*.lock"))


def last_seen(home: Path) -> datetime | None:
    """When a reconciler of this home last looked at its jobs; None: never."""
    try:
        return datetime.fromtimestamp((home / FOLDER / _SEEN).stat().st_mtime, UTC)
    except OSError:
        return None


def _is_locked(path: Path) -> bool | None:
    """Whether somebody holds the lock of a file; None where there is no such file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError:
        return True  # of another user: not to be asked, and not known to be dead
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def find_dead(others: Mapping[str, str]) -> list[str]:
    """Of these tokens with their owners, those whose life on this machine is certainly over."""
    return [token for token, owner in others.items() if _is_over(token, owner)]


def _is_over(token: str, owner: str) -> bool:
    host, _, name = owner.partition(" ")
    path = Path(name)
    # A file that is not to be seen from here may be that of another container with the same name.
    if host != socket.gethostname() or path.name != f"{token}.lock" or _is_locked(path) is not False:
        return False
    path.unlink(missing_ok=True)
    return True
