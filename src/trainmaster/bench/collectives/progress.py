"""Progress of each rank, outside the collectives, so that a watcher can attribute a hang.

A collective that hangs hangs in every rank, and a stopped rank can report nothing. So each rank keeps two files that
outlive it: JSON lines for milestones (rendezvous done, a point finished with its figures), and five numbers in mapped
memory that are updated before and after every round at no cost.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

_LAYOUT = struct.Struct("<qqqqd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Position of a rank: the point, the round of it, inside the collective or between two."""

    seq: int = -1  # -1: before the first
    op: int = 0
    inside: bool = False
    beats: int = 0  # updates so far
    at: float = 0.0  # time of the last update, by the rank's own clock

    @property
    def position(self) -> tuple[int, int, bool]:
        return self.seq, self.op, self.inside


class ProgressSink(Protocol):
    """Destination of a rank's progress: the files below, or the store shared by ranks of several machines."""

    def record(self, what: str, **words: Any) -> None: ...
    def advance(self, seq: int, op: int, *, inside: bool) -> None: ...
    def close(self) -> None: ...


class ProgressFile:
    """The two progress files of one rank, in a folder that its launcher reads."""

    def __init__(self, folder: Path, rank: int) -> None:
        lines, position = files(folder, rank)
        self._lines = os.open(lines, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        fd = os.open(position, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(fd, _LAYOUT.size)
        self._memory = mmap.mmap(fd, _LAYOUT.size)
        os.close(fd)
        self._beats = 0

    def record(self, what: str, **words: Any) -> None:
        # One unbuffered write per line: a killed process leaves whole lines.
        os.write(self._lines, (json.dumps({"what": what, "at": time.time(), **words}) + "\n").encode())

    def advance(self, seq: int, op: int, *, inside: bool) -> None:
        self._beats += 1
        _LAYOUT.pack_into(self._memory, 0, seq, op, int(inside), self._beats, time.time())

    def close(self) -> None:
        self._memory.close()
        os.close(self._lines)


class ProgressReader:
    """Incremental reader of one rank's progress files."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._paths = files(folder, rank)
        self._offset = 0

    def lines(self) -> list[dict[str, Any]]:
        """Lines since the last call. A partial line waits for its rest; an unreadable one is skipped."""
        try:
            with self._paths[0].open("rb") as file:
                file.seek(self._offset)
                raw = file.read()
        except FileNotFoundError:
            return []
        whole = raw[: raw.rfind(b"\n") + 1]
        self._offset += len(whole)
        records = []
        for line in whole.splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                records.append(value)
        return records

    def progress(self) -> Progress:
        try:
            raw = self._paths[1].read_bytes()
        except FileNotFoundError:
            return Progress()
        return unpack(raw)


def unpack(raw: bytes) -> Progress:
    """Progress from its bytes; never written means before the first point."""
    if len(raw) != _LAYOUT.size:
        return Progress()
    seq, op, inside, beats, at = _LAYOUT.unpack(raw)
    return Progress(seq=seq, op=op, inside=bool(inside), beats=beats, at=at) if beats else Progress()


def pack(progress: Progress) -> bytes:
    return _LAYOUT.pack(progress.seq, progress.op, int(progress.inside), progress.beats, progress.at)


def files(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"rank-{rank}.jsonl", folder / f"rank-{rank}.pulse"
