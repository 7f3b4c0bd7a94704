"""Working folder of a job's ranks, and the event file `global.json` that programs write there.

Every job has a folder of its own: relative paths of two jobs never meet. An uploaded `workdir` of the spec lies in it
already; the entries of a folder on this node are linked into it. `python train.py` finds its script and its data, and
what a program creates lies in its own folder.

A program that appends events to `global.json` in its working folder needs no further step: whole lines are copied into
the attempt's event file. Times without an offset are read in the spec's zone, or else in that of such files
(Asia/Kolkata), and written with their offset.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from trainmaster.core.compat import UTC
from trainmaster.core.events import parse, render
from trainmaster.core.files import append_plain, open_plain
from trainmaster.core.plan import WORK_FOLDER, Plan
from trainmaster.core.spec import GLOBAL_FILE, zone_of
from trainmaster.core.workdir import find_digest

_AT_ONCE = 1 << 20  # bytes copied in one turn
_LINE_LIMIT = 1 << 20  # a longer line is copied in pieces, each of them a fault


def make(plan: Plan) -> Path:
    """The folder that the plan names, or the working folder of its job.

    The latter with links to the entries of `workdir` where that is a folder here.
    """
    if plan.work is not None:
        return Path(plan.work)
    attempt = Path(plan.folder)
    job = attempt.parent.parent if attempt.parent.name == "attempts" else attempt
    work = job / WORK_FOLDER
    work.mkdir(parents=True, exist_ok=True)
    if plan.spec.workdir is not None and find_digest(plan.spec.workdir) is None:
        for entry in os.scandir(plan.spec.workdir):
            if entry.name != GLOBAL_FILE:
                with contextlib.suppress(FileExistsError):  # of an earlier attempt, or the program's own
                    (work / entry.name).symlink_to(entry.path)
    return work


class GlobalFile:
    """Copies new lines of `global.json` into the event file. One agent runs an attempt once, so each line goes once."""

    def __init__(self, plan: Plan, work: Path, events: Path) -> None:
        self._path, self._events = work / GLOBAL_FILE, events
        self._zone = zone_of(plan.spec, GLOBAL_FILE)
        self._offset = self._size()  # lines of an earlier attempt are in its own stream
        self._held = b""

    def copy(self, *, last: bool = False) -> None:
        """Append what is new; with `last` also a line without its newline. A full disk must not stop the run."""
        with contextlib.suppress(OSError):
            while chunk := self._read():
                self._held += chunk
                *lines, self._held = self._held.split(b"\n")
                if len(self._held) > _LINE_LIMIT:
                    lines.append(self._held)
                    self._held = b""
                self._append(lines)
            if last and self._held:
                lines, self._held = [self._held], b""
                self._append(lines)

    def _read(self) -> bytes:
        # Not through a link: it may be one to the event file itself, whose lines are read already.
        try:
            fd = open_plain(self._path, os.O_RDONLY)
        except OSError:
            return b""
        try:
            facts = os.fstat(fd)
            if os.path.samestat(facts, self._events.stat()):
                return b""
            if facts.st_size < self._offset:  # truncated, or begun anew
                self._offset, self._held = 0, b""
            chunk = os.pread(fd, _AT_ONCE, self._offset)
            self._offset += len(chunk)
            return chunk
        finally:
            os.close(fd)

    def _size(self) -> int:
        with contextlib.suppress(OSError):
            return self._path.lstat().st_size if not self._path.is_symlink() else 0
        return 0

    def _append(self, lines: list[bytes]) -> None:
        written = b"".join(self._line(raw) for raw in lines if raw.strip())
        if written:
            append_plain(self._events, written)

    def _line(self, raw: bytes) -> bytes:
        event, fault = parse(raw, zone=self._zone)
        if event is None or fault is not None:
            return raw.replace(b"\n", b" ") + b"\n"
        return render(replace(event, ts=event.ts or datetime.now(UTC))).encode() + b"\n"
