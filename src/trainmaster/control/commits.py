"""What many jobs ask of the database at once is done together: changes in one transaction, reads in one view.

A commit is one fsync and, here, a connection, a thread and two waits; starting a job takes six of them. Nobody waits
for others to come: what arrives while one batch is done makes the next. Lines of jobs alone wait a moment, since the
records of many streams are derived with few statements.

Where a change raises, which is rare, all are taken back and made again, each with a savepoint of its own: that one is
left out, and a change does nothing but write rows. Reads are repeated one by one. Where the database is away, is full
or cannot commit, all of them fail, as each would have by itself.

On PostgreSQL each change has its own transaction: several in one would hold the rows of many jobs, in any order.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from trainmaster.control import failpoints
from trainmaster.store import attempts, events
from trainmaster.store.database import Connection, Database, is_unavailable
from trainmaster.store.events import Chunk
from trainmaster.store.rows import AttemptRow, JobRow

T = TypeVar("T")
Asked = TypeVar("Asked")
Found = tuple[JobRow | None, AttemptRow | None]
Change = tuple[Callable[[Connection], Any], str]
_MOST = 50  # changes in one transaction: other writers wait for it; and reads in one view
_GATHER_S = 0.05  # longest wait of lines for those of other jobs
MOST_LINES = 2000  # of one transaction
FEWEST_LINES = 25
TARGET_S = 0.05  # of work in one transaction; a fifth of the longest wait that other writers should meet


class TransactionSize:
    """Number of lines for the next transaction, from the time that the last one took for each of its lines.

    A line that becomes a record costs ten times a plain one, and a loaded machine makes both slower: a fixed number of
    lines bounds neither. The commit itself is left out of the measure: its fsync costs the same for one line as for
    many.
    """

    def __init__(self) -> None:
        self.lines = 4 * FEWEST_LINES

    @contextlib.contextmanager
    def measure(self, lines: int) -> Iterator[None]:
        """Time the work of one transaction of so many lines; the commit comes after it."""
        began = time.monotonic()
        yield
        self.adapt(lines, time.monotonic() - began)

    def adapt(self, lines: int, took_s: float) -> None:
        """Shrink at once to what fits the target; double where twice as many would fit."""
        fitting = int(lines * TARGET_S / took_s) if took_s > 0 else 2 * MOST_LINES
        if took_s > TARGET_S:
            self.lines = max(FEWEST_LINES, min(fitting, self.lines))
        elif fitting >= 2 * self.lines:  # few lines say little: the fixed cost of a transaction counts for most of them
            self.lines = min(2 * self.lines, MOST_LINES)


class Batches(Generic[Asked]):
    """Asked one by one, done many at once in a thread. `do` gives for each what it returned, or its error."""

    def __init__(self, do: Callable[[Database, list[Asked]], Sequence[Any]]) -> None:
        self._do = do
        self._waiting: list[tuple[Asked, asyncio.Future[Any]]] = []
        self._task: asyncio.Task[None] | None = None

    async def ask(self, db: Database, asked: Asked) -> Any:
        """Return what this one's work returned, once its batch is done; raise what it raised."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, done))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work(db), name=type(self).__name__)
        return await done

    async def close(self) -> None:
        """Wait for what is being done."""
        if self._task is not None and not self._task.done():
            await self._task

    async def _work(self, db: Database) -> None:
        batch: list[tuple[Asked, asyncio.Future[Any]]] = []
        try:
            while self._waiting:
                await self._gather()
                # Of a task that was cut off nothing is done: its job's next one may ask for the same.
                self._waiting = [each for each in self._waiting if not each[1].done()]
                if not self._waiting:
                    break  # a transaction of nothing would wait for the one writer all the same
                count = self._count()
                batch, self._waiting = self._waiting[:count], self._waiting[count:]
                try:
                    results = await asyncio.to_thread(self._do, db, [asked for asked, _ in batch])
                except Exception as error:
                    results = [error] * len(batch)
                for (_, done), result in zip(batch, results, strict=True):
                    if done.done():
                        continue  # its job's task was cut off meanwhile
                    if isinstance(result, StopIteration):  # which no future takes
                        done.set_exception(RuntimeError(f"{result!r} left a query"))
                    elif isinstance(result, Exception):
                        done.set_exception(result)
                    else:
                        done.set_result(result)
        finally:  # where this task itself is cut off, nobody else does these
            for _, done in [*batch, *self._waiting]:
                done.cancel()
            self._waiting = []

    async def _gather(self) -> None:
        """Wait for others, where that is worth it."""

    def _count(self) -> int:
        """How many of those that wait make the next batch."""
        return _MOST


class Commits(Batches[Change]):
    """Changes of one reconciler that wait for SQLite's one writer: group commit."""

    def __init__(self) -> None:
        super().__init__(_commit)

    async def write(self, db: Database, change: Callable[[Connection], T], *, what: str) -> T:
        """Return what the change returns once it is committed; raise what it raises. `what` names it for drills."""
        if not db.has_one_writer:
            return await asyncio.to_thread(_commit_one, db, change, what)
        result: T = await self.ask(db, (change, what))
        return result


def _commit_one(db: Database, change: Callable[[Connection], T], what: str) -> T:
    with failpoints.around(f"commit {what}"), db.write() as conn:
        return change(conn)


def _commit(db: Database, changes: list[Change]) -> list[Any]:
    """What each change returned, or the error for which it was taken back. Raises where nothing was committed."""
    if len(changes) == 1:
        return [_commit_one(db, *changes[0])]
    for _, what in changes:
        failpoints.before(f"commit {what}")
    try:
        with db.write() as conn:
            results = [change(conn) for change, _ in changes]
    except Exception as error:
        if is_unavailable(error):
            raise
        results = _commit_apart(db, changes)
    for (_, what), result in zip(changes, results, strict=True):
        if not isinstance(result, Exception):
            failpoints.after(f"commit {what}")
    return results


def _commit_apart(db: Database, changes: list[Change]) -> list[Any]:
    results: list[Any] = []
    with db.write() as conn:
        for change, _ in changes:
            try:
                with conn.begin_nested():
                    results.append(change(conn))
            except Exception as error:
                if is_unavailable(error):
                    raise
                results.append(error)
    return results


class GroupCommit(Batches[Chunk]):
    """Append lines of many jobs in one transaction: each waits `_GATHER_S` for the others, unless one is full."""

    def __init__(self) -> None:
        super().__init__(self._append)
        self.size = TransactionSize()

    async def append(self, db: Database, chunk: Chunk) -> bool:
        """Return once the chunk is committed: False if another reader was first.

        Raise if the transaction failed: nothing of it was stored, and another job's chunk may be the cause.
        """
        stored: bool = await self.ask(db, chunk)
        return stored

    async def _gather(self) -> None:
        if sum(len(chunk.lines) for chunk, _ in self._waiting) < self.size.lines:
            await asyncio.sleep(_GATHER_S)

    def _count(self) -> int:
        """The oldest chunks, up to the lines of one transaction."""
        lines = 0
        for count, (chunk, _) in enumerate(self._waiting):
            lines += len(chunk.lines)
            if count > 0 and lines > self.size.lines:
                return count
        return len(self._waiting)

    def _append(self, db: Database, chunks: list[Chunk]) -> list[bool]:
        for chunk in chunks:
            failpoints.before("commit lines", chunk.lines[0].offset)
        with db.write() as conn, self.size.measure(sum(len(chunk.lines) for chunk in chunks)):
            stored = events.append_chunks(conn, chunks)
        for chunk in chunks:
            failpoints.after("commit lines", chunk.lines[0].offset)
        return stored


class Reads(Batches[Callable[[], Any]]):
    """Reads of one reconciler. They share a thread and a view; jobs with their last attempts are one query too."""

    def __init__(self) -> None:
        super().__init__(_read)
        self._jobs = Batches(_find)

    async def read(self, db: Database, query: Callable[[], T]) -> T:
        """Return what a short query of this database returns; raise what it raises."""
        result: T = await self.ask(db, query)
        return result

    async def find(self, db: Database, job_id: str) -> Found:
        """A job as it is now, and its last attempt where it has one."""
        found: Found = await self._jobs.ask(db, job_id)
        return found

    async def close(self) -> None:
        await super().close()
        await self._jobs.close()


def _read(db: Database, queries: list[Callable[[], Any]]) -> list[Any]:
    """What each query returned, in one view. Where one raises, each in its own: the error is that query's alone."""
    try:
        with db.read():
            return [query() for query in queries]
    except Exception as error:
        if is_unavailable(error) or len(queries) == 1:
            return [error] * len(queries)
    return [answer for query in queries for answer in _read(db, [query])]


def _find(db: Database, job_ids: list[str]) -> list[Found | Exception]:
    """These jobs in one query. Where a row cannot be read, each in its own: the error is that job's alone."""
    try:
        rows = attempts.find_last(db, job_ids)
        return [rows.get(job_id, (None, None)) for job_id in job_ids]
    except Exception as error:
        if is_unavailable(error) or len(job_ids) == 1:
            return [error] * len(job_ids)
    return [row for one in job_ids for row in _find(db, [one])]
