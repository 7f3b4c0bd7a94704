"""Append events to a file, one whole JSON line each, from any number of processes.

`seq` counts the lines of the file, not of the writer: it is read from the last good line under a lock, so that a
restarted writer continues where the file ended. A partial line of a killed writer is first closed by a newline: it
stays one garbage line and damages no other.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from trainmaster.core.compat import UTC
from trainmaster.core.event_catalog import CHECK_VARIABLE, list_faults
from trainmaster.core.events import Event, clean_value, render

Fsync = Literal["always", "marks", "never"]
FILE_LIMIT = 4 << 30  # bytes of an event file; the server keeps no more of a job either (control/quotas.py)
_GUARDED = 64  # bytes of the last line that are compared
_TAIL = 1 << 16  # bytes read back at first to find the last good line
_RECENT = 1 << 16  # bytes in which `holds` looks


class Emitter:
    """Writes to one event file.

    `fsync` says what a power cut may take: "always" nothing; "marks" only STEP and HEARTBEAT lines since the last
    other event; "never" leaves it to the kernel. A killed process loses nothing in any of the three.

    With `guard`, as the agent's, it sees that lines before its last one are gone, and writes HEARTBEAT events_lost.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        fsync: Fsync = "marks",
        guard: bool = False,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._path = Path(path)
        self._fsync = fsync
        self._now = now
        self._end = -1  # file size after our last line; the cached seq holds only while nobody else wrote
        self._seq = 0
        self._guard, self._tail = guard, b""  # the bytes before `_end`: a file that lost them was truncated
        self._check = bool(os.environ.get(CHECK_VARIABLE))  # in tests: every event of ours is in the catalogue
        self._mutex = threading.Lock()  # the file's lock is the process's: it does not keep threads apart
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = self._open()

    def emit(
        self, phase: str, event: str, *, iteration: int | None = None, epoch: int | None = None, **data: Any
    ) -> Event:
        """Append one event and return it as written."""
        if self._check and (faults := list_faults(phase, event, data, epoch=epoch)):
            raise ValueError("; ".join(faults))
        draft = Event(phase=phase, event=event, ts=self._now(), iteration=iteration, epoch=epoch, data=data)
        with self._mutex:
            if self._guard:
                self._follow_file()
                if self._has_lost():
                    self._emit("HEARTBEAT", "events_lost", after_seq=self._seq, left_bytes=os.fstat(self._fd).st_size)
            written = self._append(draft)
        if self._fsync == "always" or (self._fsync == "marks" and phase not in ("STEP", "HEARTBEAT")):
            os.fsync(self._fd)
        return written

    def holds(self, phase: str, event: str, *, since: tuple[str, str], **values: Any) -> bool:
        """Whether one of the last lines, after the last event `since`, is this event with these values, whoever wrote
        it. A file that cannot be read holds nothing: an event told twice is better than a run that ends."""
        wanted = clean_value(values).items()
        try:
            with self._mutex:
                if self._guard:
                    self._follow_file()
                size = os.fstat(self._fd).st_size
                start = max(0, size - _RECENT)
                lines = os.pread(self._fd, size - start, start).split(b"\n")
        except OSError:
            return False
        for line in reversed(lines):
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
                item = json.loads(line)
                if (item["phase"], item["event"]) == since:
                    return False
                if (item["phase"], item["event"]) == (phase, event) and wanted <= item["data"].items():
                    return True
        return False

    def bound(self, limit_bytes: int = FILE_LIMIT) -> None:
        """Empty the file where it has grown beyond any use: a program that writes without end must not fill the disk.

        The next reader sees another file, and this says that lines are gone.
        """
        with self._mutex:
            self._follow_file()
            size = os.fstat(self._fd).st_size
            if size <= limit_bytes:
                return
            with _locked(self._fd):
                os.ftruncate(self._fd, 0)
        self.emit("HEARTBEAT", "events_cut", cut_bytes=size)

    def _emit(self, phase: str, event: str, **data: Any) -> None:
        self._append(Event(phase=phase, event=event, ts=self._now(), iteration=None, epoch=None, data=data))

    def _append(self, draft: Event) -> Event:
        with _locked(self._fd):
            size = os.fstat(self._fd).st_size
            if size != self._end:  # numbers of a guard never go back: what is missing can be counted
                self._seq = max(_last_seq(self._fd, size), self._seq if self._guard else 0)
            written = replace(draft, seq=self._seq + 1)
            line = (render(written) + "\n").encode()
            if size and os.pread(self._fd, 1, size - 1) != b"\n":
                line = b"\n" + line
            _write_whole(self._fd, line, size)
            self._end, self._tail = size + len(line), line[-_GUARDED:]
            self._seq += 1
        return written

    def _has_lost(self) -> bool:
        """Whether our last line is not where it was: others only append, so the file was truncated or replaced."""
        return self._end > 0 and os.pread(self._fd, len(self._tail), self._end - len(self._tail)) != self._tail

    def _follow_file(self) -> None:
        """Write into the file that has the name: one that was removed or replaced is read by nobody."""
        try:
            ours, named = os.fstat(self._fd), self._path.lstat()
            if (ours.st_dev, ours.st_ino) == (named.st_dev, named.st_ino):
                return
        except FileNotFoundError:
            pass
        except OSError:
            return
        with contextlib.suppress(OSError):  # a folder or a link took its place: the old file is as good as any
            fd = self._open(os.O_NOFOLLOW | os.O_NONBLOCK)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                fd, self._fd = self._fd, fd
            os.close(self._fd)
            self._fd = fd

    def _open(self, flags: int = 0) -> int:
        return os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | flags, 0o644)

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Emitter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write_whole(fd: int, line: bytes, size: int) -> None:
    """Write all or nothing: on a full disk the file is truncated to whole lines before the error is raised."""
    done = 0
    try:
        while done < len(line):
            done += os.write(fd, line[done:])
    except OSError:
        os.ftruncate(fd, size)
        raise


@contextlib.contextmanager
def _locked(fd: int) -> Iterator[None]:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError:  # a file system without locks: O_APPEND still keeps whole lines apart
        yield
        return
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _last_seq(fd: int, size: int) -> int:
    """`seq` of the last good line, however far back: lines may be long, and so may garbage."""
    reach = _TAIL
    while True:
        start = max(0, size - reach)
        lines = os.pread(fd, size - start, start).split(b"\n")
        # The first piece may be the end of a longer line, and the end of one can look like a whole one.
        for line in reversed(lines if start == 0 else lines[1:]):
            try:
                return int(json.loads(line)["seq"])
            except (ValueError, TypeError, KeyError, RecursionError):
                continue
        if start == 0:
            return 0
        reach *= 4
