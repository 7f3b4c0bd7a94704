"""Search in the logs of an attempt with regular expressions, in a process that can be stopped (grep.py)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmaster.control.log_view import grep, logs
from trainmaster.core.errors import UsageError
from trainmaster.storage import Store
from trainmaster.store.database import Database
from trainmaster.store.rows import AttemptRow, JobRow

LONGEST = 200  # characters of an expression
SECONDS = 0.6  # of one search with its start; it goes on where it stopped when it is asked again
_GRACE_S = 20.0  # on a busy machine: what an expression may use is seconds of CPU, and grep.py limits them
_PIECE = 1 << 20
MOST_OF_ONE = 8  # searches of one caller, with those that wait
MOST_AT_ONCE = 2  # searches of a server: each may keep its cores busy for its seconds
MOST_PARTS = 4  # of a file that are searched at once, each by a core
PART = 64 << 20  # bytes that are worth a program of their own: it starts in 20 ms
# Else each copy of a block is memory that is asked of the kernel and given back: 0.4 of the CPU of a search.
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "67108864", "MALLOC_TRIM_THRESHOLD_": "67108864"}

ERROR = r"\b(ERROR|CRITICAL|FATAL|Traceback|[A-Za-z.]{0,80}(Error|Exception):|Segmentation fault|NCCL WARN|Killed)"
WARNING = rf"\bWARN(ING)?\b|{ERROR}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of one stream, by its first byte."""

    stream: str
    offset: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Lines that match. `next`: offset at which a further search goes on; None: the log was searched to its end."""

    lines: tuple[LogLine, ...]
    next: int | None
    fault: str | None = None  # why there was no search: a fault of the expression


class Slots:
    """Searches that may run at once: so many of a server, and one of each caller. The others wait."""

    def __init__(self) -> None:
        self._all = asyncio.Semaphore(MOST_AT_ONCE)
        self._own: dict[str, asyncio.Lock] = {}
        self._waiting: Counter[str] = Counter()

    def count(self, caller: str) -> int:
        return self._waiting[caller]

    @contextlib.asynccontextmanager
    async def take(self, caller: str) -> AsyncIterator[None]:
        own = self._own.setdefault(caller, asyncio.Lock())
        self._waiting[caller] += 1
        try:
            async with own, self._all:
                yield
        finally:
            self._waiting[caller] -= 1
            if not self._waiting[caller]:
                del self._waiting[caller], self._own[caller]


async def search(
    db: Database,
    storage: Store,
    job: JobRow,
    attempt: AttemptRow,
    stream: str,
    *,
    slots: Slots,
    caller: str,
    pattern: str,
    also: str | None = None,
    ignore_case: bool = False,
    literal: bool = False,
    offset: int = 0,
    limit: int = 200,
    seconds: float = SECONDS,
) -> Found:
    """Lines of a stream from an offset that an expression matches, and `also` another, for so many seconds at most.

    `literal`: the pattern is a text, in which no character has a meaning of its own.
    """
    if len(pattern) > LONGEST:
        raise UsageError(f"an expression has {LONGEST} characters at most")
    pattern = re.escape(pattern) if literal else pattern
    path = _path(storage, job, attempt, stream) if logs.is_over(job, attempt) else None
    request = {"pattern": pattern, "ignore_case": ignore_case, "offset": offset, "limit": limit, "seconds": seconds,
               "path": path, "also": also}  # fmt: skip
    if slots.count(caller) >= MOST_OF_ONE:
        text = f"{MOST_OF_ONE} searches of yours wait already; try again when they are over"
        return Found(lines=(), next=None, fault=text)
    async with slots.take(caller):
        request["begun"] = time.monotonic()
        if path is None:
            return await _run(request, stream, _pieces(db, storage, job, attempt, stream, offset=offset))
        try:
            parts = list(_split(path, offset))
        except FileNotFoundError:
            return Found(lines=(), next=None, fault="the log is no longer there")
        tried = await asyncio.gather(*(_run({**request, **part}, stream) for part in parts))
    return _join(tried, limit)


def _split(path: str, offset: int) -> Iterator[dict[str, Any]]:
    """What is left of a file in parts, one for each program that searches; a small one stays whole."""
    size = max(0, Path(path).stat().st_size - offset)
    parts = min(max(1, size // PART), os.cpu_count() or 1, MOST_PARTS)
    ends = [offset + size * part // parts for part in range(1, parts)]
    for begin, end in zip([offset, *ends], [*ends, None], strict=True):
        yield {"offset": begin, "end": end, "within": begin != offset}


def _join(parts: Sequence[Found], limit: int) -> Found:
    """Parts of one log, in order: what was found behind a place that was not searched is found again later."""
    lines: list[LogLine] = []
    for part in parts:
        if part.fault:
            return Found(lines=tuple(lines), next=None, fault=part.fault)
        lines += part.lines
        if len(lines) > limit:
            return Found(lines=tuple(lines[:limit]), next=lines[limit].offset)
        if part.next is not None:
            return Found(lines=tuple(lines), next=part.next)
    return Found(lines=tuple(lines), next=None)


async def _run(request: dict[str, Any], stream: str, pieces: AsyncIterator[bytes] | None = None) -> Found:
    """One program, over a file or over what it is given."""
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", str(Path(grep.__file__)), stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, limit=1 << 20, env=_ENVIRONMENT,
    )  # fmt: skip
    assert program.stdin is not None and program.stdout is not None
    lines: list[LogLine] = []
    feeding: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(request["seconds"] + _GRACE_S):
            program.stdin.write(json.dumps(request).encode() + b"\n")
            if pieces is not None:
                feeding = asyncio.create_task(_feed(program.stdin, pieces))
            async for raw in program.stdout:
                answer = json.loads(raw)
                if "fault" in answer:
                    return Found(lines=(), next=None, fault=answer["fault"])
                if "next" in answer:
                    return Found(lines=tuple(lines), next=None if answer["done"] else answer["next"])
                lines.append(LogLine(stream=stream, offset=answer["at"], text=answer["text"]))
    except TimeoutError:
        return Found(lines=tuple(lines), next=None, fault="the server is too busy to search now; try again")
    finally:
        if feeding is not None:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
        with contextlib.suppress(ProcessLookupError):
            program.kill()
        await program.wait()
    return Found(lines=tuple(lines), next=None, fault="the expression takes too long on this log; make it simpler")


def _path(storage: Store, job: JobRow, attempt: AttemptRow, stream: str) -> str | None:
    """The file itself where storage is a folder of this machine; a gigabyte need not go through a pipe."""
    if "://" in storage.url:
        return None
    root = Path(storage.url)
    place = root / "jobs" / job.id / "attempts" / str(attempt.number) / stream
    return str(place) if place.is_file() and place.resolve().is_relative_to(root.resolve()) else None


async def _pieces(
    db: Database, storage: Store, job: JobRow, attempt: AttemptRow, stream: str, *, offset: int
) -> AsyncIterator[bytes]:
    while piece := await logs.read(db, storage, job, attempt, stream, offset=offset, limit=_PIECE):
        yield piece
        offset += len(piece)


async def _feed(pipe: asyncio.StreamWriter, pieces: AsyncIterator[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        async for piece in pieces:
            pipe.write(piece)
            await pipe.drain()
    pipe.close()
