"""Take the new lines of an attempt's event stream into the store, each exactly once.

The store holds the offset up to which every byte is kept. A pass reads on from there, cuts whole lines, and commits
lines and offset together. Whatever happens in between (a kill, a second reader, other read sizes) the rows are those
of the file read at once: a line's row depends on the bytes of the file alone.

A line longer than `LINE_LIMIT` is not held in memory: it is kept as faults, cut every `LINE_LIMIT` bytes from its
start, and the stream's row remembers that the offset lies inside such a line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import tzinfo

from trainmaster.control import failpoints
from trainmaster.core.events import Line, split
from trainmaster.core.plan import EVENTS_FILE
from trainmaster.store import Database, events

CHUNK = 1 << 20  # bytes asked of a target at a time; also about what one transaction holds
LINE_LIMIT = 8 << 20  # bytes of one line that are held in memory; our own longest lines are a few kilobytes
PASS_LIMIT = 64 << 20  # bytes of one pass, so that one job's backlog does not keep its other needs waiting
TEXT_LIMIT = 1 << 12  # bytes kept as text of each piece of a line that is too long

# How the caller reads the stream: (offset, limit) → bytes, empty where there is no more.
Read = Callable[[int, int], Awaitable[bytes]]


async def ingest(
    db: Database,
    attempt: str,
    read: Read,
    *,
    zone: tzinfo,
    stream: str = EVENTS_FILE,
    last: bool = False,
    chunk: int = CHUNK,
    line_limit: int = LINE_LIMIT,
) -> bool:
    """One pass from the acknowledged offset. True if it reached the end of the stream.

    `last` says that nobody writes any more: then the half line at the end is taken too.
    """
    seen = await asyncio.to_thread(events.find_stream, db, attempt, stream)
    start, inside = seen.offset, seen.inside
    held = b""  # what lies behind `start` and is not yet a whole line
    taken = 0
    while taken < PASS_LIMIT:
        # Never more than the limit in hand: a line is then too long or not, whatever sizes the reads have.
        got = await read(start + len(held), min(chunk, line_limit - len(held)))
        taken += len(got)
        held += got
        lines, inside = await asyncio.to_thread(
            cut, held, offset=start, zone=zone, inside=inside, last=last and not got, line_limit=line_limit
        )
        if lines:
            if not await asyncio.to_thread(_keep, db, attempt, stream, lines, inside=inside):
                return False  # another reader was first: the next pass begins where it stopped
            end = lines[-1].offset + lines[-1].length
            held, start = held[end - start :], end
        if not got:
            return True
    return False


def _keep(db: Database, attempt: str, stream: str, lines: list[Line], *, inside: bool) -> bool:
    with failpoints.around("commit lines", lines[0].offset), db.write() as conn:
        return events.append_events(conn, attempt, stream, seen_offset=lines[0].offset, lines=lines, inside=inside)


def cut(
    held: bytes, *, offset: int, zone: tzinfo, inside: bool, last: bool, line_limit: int
) -> tuple[list[Line], bool]:
    """The lines of at most `line_limit` bytes, and whether what follows them is the rest of a line that is too long."""
    assert len(held) <= line_limit, "more in hand than one line may have"
    newline = held.find(b"\n")
    if newline < 0 and len(held) == line_limit:
        return [_piece(held, offset)], True
    if newline < 0 and (not last or not held):
        return [], inside
    if not inside:
        return split(held, offset=offset, zone=zone, last=last), False
    rest = newline + 1 if newline >= 0 else len(held)
    return [_piece(held[:rest], offset), *split(held[rest:], offset=offset + rest, zone=zone, last=last)], False


def _piece(raw: bytes, offset: int) -> Line:
    text = raw[:TEXT_LIMIT].decode("utf-8", errors="replace").replace("\x00", "\ufffd").rstrip("\n")
    return Line(offset=offset, length=len(raw), fault="part of a line that is too long to keep", text=text)
