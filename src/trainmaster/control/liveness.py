"""One life of a reconciler: its token, and a lock by which others on this machine see at once that it has ended.

The kernel drops a lock with its holder. Whoever can lock the file of another life knows that it is over, and need not
wait for its leases to run out. About a life on another machine, or in another container, only the leases speak.
"""

from __future__ import annotations

import fcntl
import os
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path

FOLDER = "reconcilers"


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

    def end(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def find_dead(others: Mapping[str, str]) -> list[str]:
    """Of these tokens with their owners, those whose life on this machine is certainly over."""
    return [token for token, owner in others.items() if _is_over(token, owner)]


def _is_over(token: str, owner: str) -> bool:
    host, _, name = owner.partition(" ")
    path = Path(name)
    if host != socket.gethostname() or path.name != f"{token}.lock":
        return False
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False  # not to be seen from here: perhaps another container with the same name
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(fd)
