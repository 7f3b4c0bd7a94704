"""Ingest: read the new lines of an attempt's event stream into the store, each exactly once.

The store holds the offset up to which every byte is stored. A pass reads on from there, cuts whole lines, and commits
lines and offset together. After a kill, with a second reader, or with other read sizes the rows are those of the file
read at once: a line's row depends on the bytes of the file alone.

A transaction holds few enough lines that one job's backlog does not keep other writers waiting (commits.py).

A line longer than `LINE_LIMIT` is not held in memory: it is stored as faults, cut every `LINE_LIMIT` bytes from its
start, and the stream's row records that the offset lies inside such a line. Its bytes need no parsing and are read in
larger steps: a sparse file of a gigabyte must not keep its job for minutes.

A job has a quota of what its events take in the database. Over it a fault marks the place, and what follows is read,
so that the offset moves on and the job counts as heard, and is not kept.

The bytes before the offset identify the file. If they are no longer there, the file was truncated, replaced or removed:
a fault marks the place, and the file that is there now is read from its start, at the offsets behind the mark.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import tzinfo
from functools import partial

from trainmaster.control import failpoints, quotas
from trainmaster.control.commits import GroupCommit, Reads, TransactionSize
from trainmaster.core.events import Line, split
from trainmaster.core.plan import EVENTS_FILE
from trainmaster.store import events
from trainmaster.store.capacity import event_quota
from trainmaster.store.database import Database, is_unavailable
from trainmaster.store.events import Chunk
from trainmaster.store.rows import StreamRow

CHUNK = 1 << 20  # bytes per read of a target
LINE_LIMIT = 8 << 20  # bytes of one line that are held in memory; our own longest lines are a few kilobytes
PASS_LIMIT = 64 << 20  # bytes of one pass, so that one job's backlog does not delay its other work
_SKIP_WEIGHT = 8  # bytes inside a line that is too long, for each that counts towards PASS_LIMIT
TEXT_LIMIT = 1 << 12  # bytes stored as text of each piece of a line that is too long
_FEW_LINES, _FEW_LINES_BYTES = 20, 64 << 10  # share a transaction with those of other jobs
_FEW_BYTES = 1 << 12  # cut at once: a thread takes longer to ask than they do
TAIL_BYTES = 64  # before the offset, compared at every read

_FAULT_CHARACTERS = 500
_TOO_LONG = "part of a line that is too long to keep"
_REPLACED = "the event file was truncated, replaced or removed here; what it holds now is read from its start"

log = logging.getLogger(__name__)

# Read of the stream: (offset, limit) → bytes, empty at the end.
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
    kept_limit: float | None = None,
    reads: Reads | None = None,
    group: GroupCommit | None = None,
) -> bool:
    """One pass from the acknowledged offset. True if it reached the end of the stream.

    `last`: no process writes to the stream any more; the half line at its end is stored too. `kept_limit`: bytes that
    the events of the job may take; not given: as the environment says. With `reads` and `group`, few lines are read and
    committed together with those of other jobs.
    """
    find = partial(_find_stream, db, attempt, stream)
    seen, kept_before = await (reads.read(db, find) if reads is not None else asyncio.to_thread(find))
    start, inside, base, tail = seen.offset, seen.inside, seen.base, seen.tail
    held = b""  # bytes behind `start` that are not yet a whole line
    taken, replaced, size = 0, False, TransactionSize()
    kept_limit = quotas.read_events_limit() if kept_limit is None else kept_limit
    room = kept_limit - kept_before
    while taken < PASS_LIMIT:
        # Never more than the limit in hand: a line is then too long or not, whatever sizes the reads have.
        limit = min(line_limit if inside else chunk, line_limit - len(held))
        place = start + len(held) - base
        got = await read_on(read, offset=place, limit=limit, tail=tail) if tail and not held else b""
        if got is None and replaced:
            return False  # twice in one pass: the next one tries again
        if got is None:
            replaced = True
            begin = await asyncio.to_thread(_begin_file, db, seen, offset=start, silent=room <= 0)
            if begin is None:
                return False
            base, start, inside, tail = begin, begin, False, b""
            continue
        got = got or await read(place, limit)
        taken += len(got) // _SKIP_WEIGHT if inside or room <= 0 else len(got)
        held += got
        if room > 0:
            end_here = last and not got
            rest = partial(cut, held, offset=start, zone=zone, inside=inside, last=end_here, line_limit=line_limit)
            lines, inside = rest() if len(held) < _FEW_BYTES else await asyncio.to_thread(rest)
            kept, room = _fit(lines, room)
            if kept:
                if not await _store(db, seen, kept, held, inside=inside, tail=tail, size=size, group=group):
                    return False  # another reader was first: the next pass begins where it stopped
                end = kept[-1].offset + kept[-1].length
                tail = tail_of(tail, held[: end - start])
                held, start = held[end - start :], end
        if held and room <= 0:
            if not await asyncio.to_thread(_drop, db, seen, held, offset=start, tail=tail):
                return False
            tail, start, inside, held = tail_of(tail, held), start + len(held), not held.endswith(b"\n"), b""
        if not got:
            return True
    return False


def _find_stream(db: Database, attempt: str, stream: str) -> tuple[StreamRow, int]:
    """How far a stream has been read, and what the events of its job take."""
    with db.read():
        return events.find_stream(db, attempt, stream), event_quota.count_kept(db, attempt)


def _fit(lines: Sequence[Line], room: float) -> tuple[Sequence[Line], float]:
    """The lines that the quota has room for, and how much is left: none where one did not fit."""
    for count, line in enumerate(lines):
        weight = event_quota.weigh(line)
        if weight > room:
            return lines[:count], 0
        room -= weight
    return lines, room


def _drop(db: Database, seen: StreamRow, raw: bytes, *, offset: int, tail: bytes | None) -> bool:
    """Move on behind bytes that are over the quota, with one mark; False if another reader was first."""
    silent = event_quota.is_cut(db, seen.attempt, seen.stream)
    if not silent:
        log.warning("attempt %s: %s (%s)", seen.attempt, event_quota.CUT, quotas.EVENTS_VARIABLE)
    mark, inside = Line(offset=offset, length=len(raw), fault=event_quota.CUT, text=""), not raw.endswith(b"\n")
    chunk = Chunk(
        attempt=seen.attempt, stream=seen.stream, lines=[mark], inside=inside, tail=tail_of(tail, raw), silent=silent
    )
    with failpoints.around("commit lines", offset), db.write() as conn:
        return events.append_chunks(conn, [chunk])[0]


async def read_on(read: Read, *, offset: int, limit: int, tail: bytes) -> bytes | None:
    """Bytes from `offset` on that came with the bytes before it; None if those are not `tail` any more."""
    got = b""
    while len(got) < len(tail):  # a read may return less than there is
        more = await read(offset - len(tail) + len(got), len(tail) + limit - len(got))
        got += more
        if not more or not tail.startswith(got[: len(tail)]):
            return None
    return got[len(tail) :]


def mark_unreadable(db: Database, attempt: str, why: str, *, stream: str = EVENTS_FILE) -> None:
    """Mark, once, that the target refuses to read the event file. Should it be readable later, it is a new file."""
    seen = events.find_stream(db, attempt, stream)
    if seen.base != seen.offset or seen.offset == 0:
        _begin_file(db, seen, offset=seen.offset, fault=f"the event file cannot be read: {why}"[:_FAULT_CHARACTERS])


def _begin_file(
    db: Database, seen: StreamRow, *, offset: int, fault: str = _REPLACED, silent: bool = False
) -> int | None:
    """Mark that the file is another one; the offset at which it begins, or None if another reader was first."""
    mark = Line(offset=offset, length=1, fault=fault, text="")
    base = offset + 1
    chunk = Chunk(
        attempt=seen.attempt, stream=seen.stream, lines=[mark], inside=False, tail=b"", base=base, silent=silent
    )
    with failpoints.around("commit new file", offset), db.write() as conn:
        return base if events.append_chunks(conn, [chunk])[0] else None


async def _store(
    db: Database,
    seen: StreamRow,
    lines: Sequence[Line],
    raw: bytes,
    *,
    inside: bool,
    tail: bytes | None,
    size: TransactionSize,
    group: GroupCommit | None,
) -> bool:
    """Commit lines with their offset; False if another reader was first."""
    length = lines[-1].offset + lines[-1].length - lines[0].offset
    if group is not None and len(lines) <= _FEW_LINES and length <= _FEW_LINES_BYTES:
        end = tail_of(tail, raw[:length])
        job_id = seen.attempt.rpartition(".")[0]
        chunk = Chunk(job_id=job_id, attempt=seen.attempt, stream=seen.stream, lines=lines, inside=inside, tail=end)
        try:
            return await group.append(db, chunk)
        except Exception as error:  # perhaps another job's: what is wrong with ours is met by itself
            if is_unavailable(error):
                raise  # each would wait again, one behind the other, for what is not there
    return await asyncio.to_thread(_store_alone, db, seen, lines, raw, inside=inside, tail=tail, size=size)


def _store_alone(
    db: Database,
    seen: StreamRow,
    lines: Sequence[Line],
    raw: bytes,
    *,
    inside: bool,
    tail: bytes | None,
    size: TransactionSize,
) -> bool:
    start, first = lines[0].offset, 0
    while first < len(lines):
        some = lines[first : first + size.lines]
        first += len(some)
        end = some[-1].offset + some[-1].length
        chunk = Chunk(
            attempt=seen.attempt,
            stream=seen.stream,
            lines=some,
            inside=inside and some[-1] is lines[-1],
            tail=tail_of(tail, raw[: end - start]),
        )
        with failpoints.around("commit lines", some[0].offset), db.write() as conn, size.measure(len(some)):
            if not events.append_chunks(conn, [chunk])[0]:
                return False
    return True


def tail_of(before: bytes | None, raw: bytes) -> bytes:
    return ((before or b"") + raw[-TAIL_BYTES:])[-TAIL_BYTES:]


def cut(
    held: bytes, *, offset: int, zone: tzinfo, inside: bool, last: bool, line_limit: int
) -> tuple[list[Line], bool]:
    """The whole lines of at most `line_limit` bytes, and whether the rest belongs to a line that is too long."""
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
    if raw == bytes(len(raw)):
        return Line(offset=offset, length=len(raw), fault=f"{_TOO_LONG}: {len(raw)} NUL bytes", text="")
    text = raw[:TEXT_LIMIT].decode("utf-8", errors="replace").replace("\x00", "\ufffd").rstrip("\n")
    return Line(offset=offset, length=len(raw), fault=_TOO_LONG, text=text)
