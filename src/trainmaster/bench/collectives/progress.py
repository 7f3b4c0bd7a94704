"""The side channel: where each rank says how far it is, so that somebody else can see who stopped.

A collective that hangs hangs in every rank, and a rank that is stopped can report nothing. So each rank keeps two files
of its own that outlive it: lines for what is worth keeping (it met the others; it finished a point, with its figures),
and a pulse of five numbers in mapped memory, which costs nothing to move and is written before and after every round.
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

_PULSE = struct.Struct("<qqqqd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """How far a rank is: which point, which round of it, inside the collective or between two."""

    seq: int = -1  # -1: before the first
    op: int = 0
    inside: bool = False
    beats: int = 0  # counts every sign of life
    at: float = 0.0  # of the last one, by its own clock

    @property
    def place(self) -> tuple[int, int, bool]:
        return self.seq, self.op, self.inside


class Board(Protocol):
    """What a rank tells while it works. The file below, or the store that ranks of several machines share."""

    def tell(self, what: str, **words: Any) -> None: ...
    def pulse(self, seq: int, op: int, *, inside: bool) -> None: ...
    def close(self) -> None: ...


class FileBoard:
    """A rank's own two files in a folder that its launcher reads."""

    def __init__(self, folder: Path, rank: int) -> None:
        lines, pulse = files(folder, rank)
        self._lines = os.open(lines, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        fd = os.open(pulse, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(fd, _PULSE.size)
        self._memory = mmap.mmap(fd, _PULSE.size)
        os.close(fd)
        self._beats = 0

    def tell(self, what: str, **words: Any) -> None:
        # One write per line, past every buffer: a killed process leaves whole lines.
        os.write(self._lines, (json.dumps({"what": what, "at": time.time(), **words}) + "\n").encode())

    def pulse(self, seq: int, op: int, *, inside: bool) -> None:
        self._beats += 1
        _PULSE.pack_into(self._memory, 0, seq, op, int(inside), self._beats, time.time())

    def close(self) -> None:
        self._memory.close()
        os.close(self._lines)


class Reader:
    """The launcher's view of one rank's files; reads what is new."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._paths = files(folder, rank)
        self._offset = 0

    def lines(self) -> list[dict[str, Any]]:
        """Lines since the last call. Half a line waits for its rest; one that cannot be read is skipped."""
        try:
            with self._paths[0].open("rb") as file:
                file.seek(self._offset)
                raw = file.read()
        except FileNotFoundError:
            return []
        whole = raw[: raw.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = []
        for line in whole.splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                found.append(value)
        return found

    def pulse(self) -> Pulse:
        try:
            raw = self._paths[1].read_bytes()
        except FileNotFoundError:
            return Pulse()
        return unpack(raw)


def unpack(raw: bytes) -> Pulse:
    """A pulse from its bytes; one that was never written is the one before the first point."""
    if len(raw) != _PULSE.size:
        return Pulse()
    seq, op, inside, beats, at = _PULSE.unpack(raw)
    return Pulse(seq=seq, op=op, inside=bool(inside), beats=beats, at=at) if beats else Pulse()


def pack(pulse: Pulse) -> bytes:
    return _PULSE.pack(pulse.seq, pulse.op, int(pulse.inside), pulse.beats, pulse.at)


def files(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"rank-{rank}.jsonl", folder / f"rank-{rank}.pulse"
