"""Group commit: changes that wait for SQLite's one writer share a transaction; and reads that share a query.

A commit is one fsync and, here, a connection, a thread and two waits; starting a job takes six of them. Nobody waits
for others to come: what arrives while one transaction is committed makes the next. Where a change raises, which is
rare, all are taken back and made again, each with a savepoint of its own: that one is left out, and a change does
nothing but write rows. Where the database is away, is full or cannot commit, all of them fail, as each would have by
itself.

On PostgreSQL each change has its own transaction: several in one would hold the rows of many jobs, in any order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from trainmaster.control import failpoints
from trainmaster.store import attempts
from trainmaster.store.database import Connection, Database, is_unavailable
from trainmaster.store.rows import AttemptRow, JobRow

T = TypeVar("T")
Found = tuple[JobRow | None, AttemptRow | None]
_MOST = 50  # changes in one transaction: other writers wait for it; and jobs in one query


@dataclass(frozen=True, slots=True)
class _Waiting:
    change: Callable[[Connection], Any]
    what: str
    done: asyncio.Future[Any]


class Commits:
    """Writes of one reconciler."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []
        self._task: asyncio.Task[None] | None = None

    async def write(self, db: Database, change: Callable[[Connection], T], *, what: str) -> T:
        """Return what the change returns once it is committed; raise what it raises. `what` names it for drills."""
        if not db.has_one_writer:
            return await asyncio.to_thread(_commit_one, db, change, what)
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(change, what, done))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work(db), name="commits")
        return await done

    async def close(self) -> None:
        """Wait for what is being committed."""
        if self._task is not None and not self._task.done():
            await self._task

    async def _work(self, db: Database) -> None:
        batch: list[_Waiting] = []
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
                try:
                    results = await asyncio.to_thread(_commit, db, [(each.change, each.what) for each in batch])
                except Exception as error:
                    results = [error] * len(batch)
                for each, result in zip(batch, results, strict=True):
                    if each.done.done():
                        continue  # its job's task was cut off meanwhile
                    if isinstance(result, Exception):
                        each.done.set_exception(result)
                    else:
                        each.done.set_result(result)
        finally:  # where this task itself is cut off, nobody else commits these
            for each in [*batch, *self._waiting]:
                each.done.cancel()
            self._waiting = []


def _commit_one(db: Database, change: Callable[[Connection], T], what: str) -> T:
    with failpoints.around(f"commit {what}"), db.write() as conn:
        return change(conn)


def _commit(db: Database, changes: list[tuple[Callable[[Connection], Any], str]]) -> list[Any]:
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


def _commit_apart(db: Database, changes: list[tuple[Callable[[Connection], Any], str]]) -> list[Any]:
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


class Reads:
    """Jobs with their last attempts, read before each step: those that are asked for at once are one query."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, asyncio.Future[Found]]] = []
        self._task: asyncio.Task[None] | None = None

    async def find(self, db: Database, job_id: str) -> Found:
        """A job as it is now, and its last attempt where it has one."""
        found: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        self._waiting.append((job_id, found))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work(db), name="reads")
        return await found

    async def close(self) -> None:
        """Wait for what is being read."""
        if self._task is not None and not self._task.done():
            await self._task

    async def _work(self, db: Database) -> None:
        batch: list[tuple[str, asyncio.Future[Found]]] = []
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
                rows = await asyncio.to_thread(_find, db, [job_id for job_id, _ in batch])
                for job_id, found in batch:
                    if found.done():
                        continue  # its job's task was cut off meanwhile
                    row = rows.get(job_id, (None, None))
                    if isinstance(row, Exception):
                        found.set_exception(row)
                    else:
                        found.set_result(row)
        finally:  # where this task itself is cut off, nobody else reads these
            for _, found in [*batch, *self._waiting]:
                found.cancel()
            self._waiting = []


def _find(db: Database, job_ids: list[str]) -> dict[str, Found | Exception]:
    """These jobs in one query. Where a row cannot be read, each in its own: the error is that job's alone."""
    try:
        return dict(attempts.find_last(db, job_ids))
    except Exception as error:
        if is_unavailable(error) or len(job_ids) == 1:
            return dict.fromkeys(job_ids, error)
    return {job_id: row for one in job_ids for job_id, row in _find(db, [one]).items()}
