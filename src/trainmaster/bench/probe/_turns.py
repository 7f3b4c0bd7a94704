"""Who may use the machine's PCIe links now: together with the other probes, or alone.

The probes of one node are processes of their own that start at once. A shared lock on one file lets them measure
together; an exclusive lock lets each measure alone, one after the other. The kernel drops the lock of a process that
dies, so a crashed probe holds nobody up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def turn(name: str, *, alone: bool) -> Iterator[None]:
    """Wait for it, hold it."""
    path = Path(tempfile.gettempdir()) / f"trainmaster-{os.getuid()}-{name}.lock"
    # The folder is everybody's: a link that somebody else put there is not followed.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)
