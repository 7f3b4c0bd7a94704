"""A window of log lines by byte offset: from a place on, up to a place, the end, or the ends of all streams merged.

However long a log is, a window reads some hundred kilobytes of it. A line is named by the offset of its first byte,
which stays the same while the log grows: that is what a link to a line holds.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from trainmaster.control.log_view import logs
from trainmaster.control.log_view.search import LogLine
from trainmaster.storage import Store
from trainmaster.store.database import Database
from trainmaster.store.rows import AttemptRow, JobRow

LINES = 200  # a browser paints twice as many 40 ms later; logs.js adds those of the next window
_BYTES = 192 << 10
_CONTEXT = 8  # lines shown before the one that a link names
_MOST_MERGED = 400
_MERGED = 32 << 10  # bytes of the end of each stream in the merged view
MOST_STREAMS = 64  # in the merged view


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Lines in order; `start` and `end` are the bytes they cover."""

    lines: tuple[LogLine, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """One stream of one attempt, open for reading."""

    db: Database
    storage: Store
    job: JobRow
    attempt: AttemptRow
    stream: str

    async def read(self, offset: int, limit: int) -> bytes:
        return await logs.read(self.db, self.storage, self.job, self.attempt, self.stream, offset=offset, limit=limit)


async def read_from(log: Log, at: int) -> Window:
    """Lines from the one that holds byte `at`, with some before it."""
    start = max(0, at - (_BYTES // 8))
    raw = await log.read(start, _BYTES)
    lines = _split(raw, start, whole=start == 0)
    first = max(0, bisect.bisect_right(lines, at, key=lambda line: line[0]) - 1 - _CONTEXT)
    return _window(log.stream, lines[first : first + LINES], at)


async def read_before(log: Log, before: int) -> Window:
    """The last lines that end before a place."""
    start = max(0, before - _BYTES)
    raw = await log.read(start, before - start)
    return _window(log.stream, _split(raw, start, whole=start == 0)[-LINES:], before)


async def read_new(log: Log, after: int, *, last: bool) -> Window:
    """Whole lines behind a place; with `last`, also one that is not ended."""
    raw = await log.read(after, _BYTES)
    end = raw.rfind(b"\n") + 1
    if last or (end == 0 and len(raw) == _BYTES):
        end = len(raw)
    return _window(log.stream, _split(raw[:end], after, whole=True), after)


async def read_merged(opened: Sequence[Log], sizes: Sequence[int]) -> list[LogLine]:
    """The ends of many streams, by the time that their lines begin with. A line without one follows the line before."""
    merged: list[tuple[str, int, int, LogLine]] = []
    for order, (log, size) in enumerate(zip(opened[:MOST_STREAMS], sizes, strict=False)):
        start = max(0, size - _MERGED)
        time = ""
        lines = _split(await log.read(start, _MERGED), start, whole=start == 0)
        for place, line in enumerate(_line(log.stream, offset, part) for offset, part in lines):
            time = max(time, _time(line.text))
            merged.append((time, order, place, line))
    merged.sort(key=lambda item: item[:3])
    return [line for *_, line in merged[-_MOST_MERGED:]]


_TIME = re.compile(r"[\[(]?(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d(?:[.,]\d{1,6})?)")


def _time(text: str) -> str:
    found = _TIME.search(text[:60])
    if found is None:
        return ""
    stamp = f"{found[1]}T{found[2].replace(',', '.')}"
    try:
        datetime.fromisoformat(stamp[:19])
    except ValueError:
        return ""
    return stamp


def _split(raw: bytes, start: int, *, whole: bool) -> list[tuple[int, bytes]]:
    """Lines of a piece of a log, each with its place. Unless the piece begins at a line, the first is left out."""
    parts = raw.splitlines(keepends=True) if b"\r" not in raw else re.findall(rb"[^\n]*\n|[^\n]+", raw)
    places = itertools.accumulate(map(len, parts), initial=start)
    lines = list(zip(places, parts, strict=False))
    return lines if whole or len(lines) < 2 else lines[1:]


def _line(stream: str, offset: int, part: bytes) -> LogLine:
    return LogLine(stream=stream, offset=offset, text=part.decode(errors="replace").rstrip("\n"))


def _window(stream: str, lines: Sequence[tuple[int, bytes]], place: int) -> Window:
    if not lines:
        return Window(lines=(), start=place, end=place)
    shown = tuple(_line(stream, offset, part) for offset, part in lines)
    return Window(lines=shown, start=lines[0][0], end=lines[-1][0] + len(lines[-1][1]))
