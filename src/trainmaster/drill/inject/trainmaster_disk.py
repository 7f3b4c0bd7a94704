"""The disk of a strike, inside the program: it is full, it is read-only, or what reaches it is noted for a power cut.

full       RLIMIT_FSIZE: from the strike on, every write past so many bytes of a file fails, whoever writes it. The
           error is EFBIG in place of ENOSPC. What the program prints goes through a pipe: its log is no such file.
readonly   The drill takes the write permission from the folder. It does not hold for root, so a process of root gives
           up CAP_DAC_OVERRIDE at its start: the error is EACCES in place of EROFS.
power      Files that are opened for writing, renamed and fsynced are noted in FOLDER/disk-PID.log, one line each. What
           torch and safetensors write, they never fsync by themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_DAC_OVERRIDE = 1 << 1  # linux/capability.h
_CAPABILITY_VERSION = 0x20080522
_ACCESS_READ = 1  # mmap.ACCESS_READ
_MOST_LINES = 100_000


class _Disk:
    """Of this process, and of its children by fork."""

    def __init__(self) -> None:
        self.room: int | None = None  # bytes of a file that can be written; None: as many as there were
        self.folder: str | None = None  # where the journal is kept; None: it is not
        self.opened: set[str] = set()
        self.lines = 0


_disk = _Disk()


def prepare(strike: dict[str, Any] | None, folder: str) -> None:
    """At the start of the interpreter, while it has one thread."""
    what = None if strike is None else strike["do"]
    if what == "full" and stat.S_ISREG(os.fstat(1).st_mode):
        _print_through_a_pipe()
    elif what == "readonly" and os.geteuid() == 0:
        _give_up_override()
    elif what == "power":
        _disk.folder = folder
        _watch_syncs()


def fill(room: int) -> None:
    """From now on no file grows past so many bytes. Python ignores SIGXFSZ, so a write fails with EFBIG.

    0: the disk itself is full.
    """
    if room:
        _disk.room = room
        _limit(room)


@contextlib.contextmanager
def lifted() -> Iterator[None]:
    """The lines of the witness are written all the same."""
    if _disk.room is None:
        yield
        return
    _limit(None)
    try:
        yield
    finally:
        _limit(_disk.room)


def name_of(place: Any, holds: Callable[[str], bool] = lambda _: False) -> str | None:
    """Of the file that is written or read; torch's distributed checkpoint puts one into a writer that is not closed.

    `holds`: whether a path is of the drill; asked for a file of mkstemp and fdopen, which knows only its number.
    """
    for one in (place, getattr(place, "name", None), getattr(getattr(place, "raw", None), "name", None)):
        if isinstance(one, (str, os.PathLike)):
            return os.fspath(one)
        path = os.path.realpath(f"/proc/self/fd/{one}") if isinstance(one, int) else ""
        if path and holds(path) and os.path.exists(path):  # noqa: PTH110
            return path
    return None


def is_in_a_thread() -> bool:
    """Whether this is written behind training."""
    return threading.current_thread() is not threading.main_thread()


def wrote(path: str) -> None:
    """A file that is about to be written by code of torch or safetensors, of which no audit event tells."""
    if _disk.folder is not None:
        _note({"k": "open", "path": path})


def is_heard() -> bool:
    """Whether what reaches the disk is noted."""
    return _disk.folder is not None


def hear(event: str, arguments: Any) -> None:
    """An audit event of Python."""
    if event == "open":
        place, flags = arguments[0], arguments[2]
        if isinstance(place, (str, os.PathLike)) and flags & (os.O_WRONLY | os.O_RDWR) and not flags & os.O_DSYNC:
            _opened(os.path.realpath(os.fspath(place)))
    elif event in ("os.rename", "os.link"):
        names = [os.path.realpath(os.fspath(name)) for name in arguments[:2]]
        _note({"k": event[3:], "path": names[0], "to": names[1]})
    elif event == "mmap.__new__" and arguments[0] >= 0 and arguments[2] != _ACCESS_READ:
        # What is written through it may be made durable by msync, which nobody hears.
        _note({"k": "unsure", "path": os.path.realpath(f"/proc/self/fd/{arguments[0]}")})
    elif event in ("subprocess.Popen", "os.system", "os.posix_spawn"):
        words = arguments[1] if event == "subprocess.Popen" else arguments[0]
        text = " ".join(map(str, words)) if isinstance(words, (list, tuple)) else str(words)
        if "sync" in [os.path.basename(word) for word in text.split()]:  # noqa: PTH119
            _note({"k": "doubt"})


def _opened(path: str) -> None:
    if path in _disk.opened or path.startswith(("/dev/", "/proc/")):
        return
    _disk.opened.add(path)
    _note({"k": "open", "path": path})


def _note(line: dict[str, Any]) -> None:
    if _disk.lines > _MOST_LINES:
        return
    _disk.lines += 1
    if _disk.lines > _MOST_LINES:
        line = {"k": "doubt"}  # what follows is not noted: a file that is fsynced later must not count as lost
    if line["k"] in ("rename", "link"):
        _disk.opened.clear()  # a file that is opened next by one of these names is another one
    path = os.path.join(str(_disk.folder), f"disk-{os.getpid()}.log")  # noqa: PTH118
    _disk.opened.add(path)  # or the event of this open would be noted in turn
    with open(path, "ab", buffering=0) as file:  # noqa: PTH123
        file.write(json.dumps({**line, "t": time.time_ns()}).encode() + b"\n")


def _watch_syncs() -> None:
    for name in ("fsync", "fdatasync"):
        setattr(os, name, _noting(getattr(os, name)))
    sync = os.sync

    def sync_and_note() -> None:
        sync()
        with contextlib.suppress(Exception):
            _note({"k": "all"})

    os.sync = sync_and_note


def _noting(sync: Callable[[Any], None]) -> Callable[[Any], None]:
    def sync_and_note(fd: Any) -> None:
        sync(fd)
        with contextlib.suppress(OSError):  # the journal cannot be written: the disk of the drill itself is full
            try:
                facts = os.fstat(fd if isinstance(fd, int) else fd.fileno())
            except Exception:  # synced all the same, and not known what
                _note({"k": "doubt"})
                return
            _note({"k": "sync", "file": facts.st_ino, "size": facts.st_size, "at": facts.st_mtime_ns})

    return sync_and_note


def _print_through_a_pipe() -> None:
    there, here = os.pipe()
    os.posix_spawnp("cat", ["cat"], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, there, 0)])
    os.dup2(here, 1)
    os.dup2(here, 2)
    os.close(there)
    os.close(here)


def _give_up_override() -> None:
    """This thread and those that it starts; the right to read everything stays."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    data = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice
    if libc.capget(header, data) == 0:
        data[0] &= ~_DAC_OVERRIDE
        libc.capset(header, data)


def _limit(room: int | None) -> None:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if room is None else room, hard))
