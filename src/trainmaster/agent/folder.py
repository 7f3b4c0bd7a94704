"""An attempt's folder as the agent holds it: one agent ever, one exit record ever, a stop file.

The lock file carries two facts. The `flock` on it says that an agent lives; its text says that one has begun. Both
are needed: a second agent must be refused while the first lives, and also after the first was killed without leaving
a record, because half a run that starts over inside the same attempt would be counted twice.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from datetime import datetime
from pathlib import Path

from trainmaster.core.compat import UTC
from trainmaster.core.errors import TargetError
from trainmaster.core.files import append_plain, sync
from trainmaster.core.plan import AGENT_LOG, EXIT_FILE, LOCK_FILE, STOP_FILE, ExitRecord

# A run that fills the disk must still be able to say so: the record's blocks are taken at the start. The largest
# record is 40 lines of 500 characters, at most six bytes each when escaped, plus the check findings.
_RESERVE_BYTES = 192 * 1024
_STOP_BYTES = 4096
_NAMELESS_S = 5.0  # for an agent that holds the lock to write its name


class Refused(TargetError):
    """This agent may not run the attempt: another one does, did, or the attempt was released."""


class AttemptFolder:
    """The folder of one attempt, ours from `begin` until this process ends."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock_fd = -1

    def begin(self) -> None:
        """Take the attempt for this process, or raise `Refused` with the reason."""
        self.path.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            self._take(fd)
        except BaseException:
            os.close(fd)
            raise
        self._lock_fd = fd

    def _take(self, fd: int) -> None:
        until = time.monotonic() + _NAMELESS_S
        while not _try_lock(fd):
            # An agent writes its name a moment after it took the lock; a reader of the state holds it for a moment.
            holder = os.pread(fd, 64, 0).decode(errors="replace").strip()
            if holder or time.monotonic() > until:
                raise Refused(f"{self.path}: another agent runs this attempt ({holder or 'starting'}); nothing started")
            time.sleep(0.01)
        if self.over:
            raise Refused(f"{self.path}: the attempt is over, its {EXIT_FILE} is there; nothing started")
        if earlier := os.pread(fd, 64, 0).decode(errors="replace").strip():
            raise Refused(f"{self.path}: this attempt has begun before ({earlier}); start a new attempt")
        (self.path / _TMP).write_bytes(b"\0" * _RESERVE_BYTES)
        mark(fd, f"pid {os.getpid()}")  # last: an attempt that could not reserve its record has not begun

    @property
    def over(self) -> bool:
        return (self.path / EXIT_FILE).exists()

    def stop_text(self) -> str | None:
        """Text of the stop file; None where no stop was requested."""
        try:
            fd = os.open(self.path / STOP_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError:
            return ""  # it is there
        try:
            return os.read(fd, _STOP_BYTES).decode(errors="replace").strip()
        except OSError:  # a workload put a folder or a pipe there
            return ""
        finally:
            os.close(fd)

    def log(self, text: str) -> None:
        """Append a line to agent.log. A full disk is ignored: a log line must not stop the run."""
        line = f"{datetime.now(UTC).isoformat(timespec='milliseconds')} {text}\n"
        with contextlib.suppress(OSError):
            append_plain(self.path / AGENT_LOG, line.encode(errors="replace"))

    def finish(self, record: ExitRecord) -> None:
        """Write the exit record: whole, durable, and never a second time."""
        assert self._lock_fd >= 0, "only the agent that began an attempt may end it"
        assert not self.over, "an exit record is written once"
        temporary = self.path / _TMP
        with temporary.open("r+b" if temporary.exists() else "wb") as file:
            file.write(record.to_json().encode() + b"\n")
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self.path / EXIT_FILE)
        sync(self.path)  # or a power cut could take the name back


_TMP = EXIT_FILE + ".tmp"


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def fence(path: Path) -> bool:
    """Make sure that no agent will ever begin here; False while one lives."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path / LOCK_FILE, flags, 0o644)
    except FileNotFoundError:
        return True  # without its folder nothing can begin
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        return True  # the workload put a link or a folder there; an agent cannot begin with it either
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(fd).st_size:
            mark(fd, "released before its start")
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def mark(fd: int, text: str) -> None:
    """Write the lock file's text, safe against a power cut: without it the attempt could begin twice."""
    os.pwrite(fd, (text + "\n").encode(), 0)
    os.fsync(fd)
