"""Changes that share a transaction: each is kept or taken back by itself, all before anybody is told."""

from __future__ import annotations

import asyncio
import functools
import threading
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import event, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError

from trainmaster.control.commits import Commits, Found, Reads
from trainmaster.core.errors import JobUnreadable, StoreError
from trainmaster.core.spec import parse_spec
from trainmaster.store.attempts import insert_attempt, list_attempts
from trainmaster.store.database import Connection, Database
from trainmaster.store.jobs import find_job, insert_job, list_ids
from trainmaster.store.tables import jobs

SPEC = parse_spec({"name": "a", "command": ["true"]})


def insert(job_id: str, *, wait: threading.Event | None = None) -> Callable[[Connection], str]:
    def change(conn: Connection) -> str:
        insert_job(conn, job_id, SPEC, at=datetime.now(UTC))
        if wait is not None:
            assert wait.wait(60)
        return job_id

    return change


async def write_behind(
    commits: Commits, db: Database, changes: Sequence[Callable[[Connection], object]]
) -> list[object]:
    """All changes at once, behind one that is being committed: they come together."""
    go = threading.Event()
    first = asyncio.create_task(commits.write(db, insert("first", wait=go), what="first"))
    await asyncio.sleep(0)
    later = [asyncio.create_task(commits.write(db, change, what="later")) for change in changes]
    await asyncio.sleep(0)
    go.set()
    return list(await asyncio.gather(first, *later, return_exceptions=True))


def test_what_waits_for_the_writer_is_committed_together_and_each_gets_its_own_answer(db: Database) -> None:
    commits, names, begun = Commits(), [str(uuid.uuid4()) for _ in range(20)], list[object]()
    event.listen(db.engine, "begin", begun.append)
    assert asyncio.run(write_behind(commits, db, [insert(name) for name in names])) == ["first", *names]
    assert set(list_ids(db)) == {"first", *names}
    assert len(begun) == 3, "the first, the others, and the list of ids"


def test_a_change_that_raises_is_taken_back_alone(db: Database) -> None:
    def refuse(conn: Connection) -> None:
        insert_job(conn, "refused", SPEC, at=datetime.now(UTC))
        raise LookupError("no")

    changes = [insert("one"), refuse, insert("one"), insert("two")]
    first, one, refused, taken, two = asyncio.run(write_behind(Commits(), db, changes))
    assert (first, one, two) == ("first", "one", "two")
    assert isinstance(refused, LookupError) and isinstance(taken, IntegrityError)
    assert set(list_ids(db)) == {"first", "one", "two"}


def test_where_the_database_is_away_nothing_of_the_transaction_is_kept(db: Database) -> None:
    def lose(_conn: Connection) -> None:
        raise StoreError("the database is locked")

    first, one, lost = asyncio.run(write_behind(Commits(), db, [insert("one"), lose]))
    assert first == "first" and isinstance(lost, StoreError)
    assert isinstance(one, StoreError) and find_job(db, "one") is None


def test_a_task_that_is_cut_off_does_not_keep_others_from_their_answer(db: Database) -> None:
    async def go() -> str:
        commits, wait = Commits(), threading.Event()
        cut = asyncio.create_task(commits.write(db, insert("cut", wait=wait), what="cut"))
        await asyncio.sleep(0.05)
        other = asyncio.create_task(commits.write(db, insert("other"), what="other"))
        await asyncio.sleep(0)
        cut.cancel()
        wait.set()
        answer = await other
        await commits.close()
        with pytest.raises(asyncio.CancelledError):
            await cut
        return answer

    assert asyncio.run(go()) == "other"
    assert set(list_ids(db)) == {"cut", "other"}


def test_where_nobody_raises_there_is_no_savepoint(db: Database) -> None:
    """It is a third of what a small change takes."""
    points: list[object] = []
    event.listen(db.engine, "savepoint", lambda conn, name: points.append(name))
    asyncio.run(write_behind(Commits(), db, [insert("one"), insert("two")]))
    assert not points and set(list_ids(db)) == {"first", "one", "two"}
    asyncio.run(write_behind(Commits(), db, [insert("one"), insert("three")]))
    assert points and set(list_ids(db)) == {"first", "one", "two", "three"}


def test_jobs_that_are_asked_for_at_once_are_one_query_each_as_it_is_now(any_db: Database) -> None:
    db, asked, names = any_db, list[str](), [str(uuid.uuid4()) for _ in range(20)]
    at = datetime.now(UTC)
    with db.write() as conn:
        for name in names:
            insert_job(conn, name, SPEC, at=at)
        for number in (1, 2):
            insert_attempt(conn, names[0], number, handle={"n": number}, at=at)

    def note(_conn: object, _cursor: object, statement: str, *_more: object) -> None:
        asked.append(statement)

    async def go() -> list[Found]:
        reads = Reads()
        found = [asyncio.create_task(reads.find(db, name)) for name in [*names, "unknown"]]
        cut = asyncio.create_task(reads.find(db, names[1]))
        await asyncio.sleep(0)
        cut.cancel()
        answers = await asyncio.gather(*found)
        await reads.close()
        return list(answers)

    event.listen(db.engine, "before_cursor_execute", note)
    answers = asyncio.run(go())
    assert len([statement for statement in asked if "FROM jobs" in statement]) == 1
    assert answers == [*((find_job(db, name), (list_attempts(db, name) or [None])[-1]) for name in names), (None, None)]
    assert answers[0][1] is not None and answers[0][1].number == 2


def test_a_row_that_cannot_be_read_is_told_to_its_own_job_alone(any_db: Database) -> None:
    """As one that a server of another version wrote."""
    db, names = any_db, [str(uuid.uuid4()) for _ in range(3)]
    with db.write() as conn:
        for name in names:
            insert_job(conn, name, SPEC, at=datetime.now(UTC))
        conn.execute(update(jobs).where(jobs.c.id == names[1]).values(spec={"name": "x", "tomorrow": 1}))

    async def go() -> list[object]:
        reads = Reads()
        return list(await asyncio.gather(*(reads.find(db, name) for name in names), return_exceptions=True))

    first, bad, last = asyncio.run(go())
    assert [first, last] == [(find_job(db, name), None) for name in (names[0], names[2])]
    assert isinstance(bad, JobUnreadable) and bad.job_id == names[1] and "tomorrow" not in str(bad)


def test_where_the_database_is_away_each_who_asked_is_told(db: Database) -> None:
    async def go() -> list[object]:
        reads = Reads()
        return list(await asyncio.gather(*(reads.find(db, name) for name in ("a", "b")), return_exceptions=True))

    assert asyncio.run(go()) == [(None, None)] * 2
    Path(str(db.engine.url.database)).unlink()
    assert [type(answer) for answer in asyncio.run(go())] == [StoreError] * 2


def test_reads_that_are_asked_for_at_once_share_a_view_and_an_error_is_its_own(any_db: Database) -> None:
    db, begun = any_db, list[object]()
    with db.write() as conn:
        insert_job(conn, "one", SPEC, at=datetime.now(UTC))

    def refuse() -> None:
        with db.read() as conn:
            conn.execute(text("SELECT 1/0"))  # PostgreSQL then refuses whatever follows in this view
        raise ZeroDivisionError  # SQLite takes it

    async def go(*queries: Callable[[], object]) -> list[object]:
        reads = Reads()
        answers = await asyncio.gather(*(reads.read(db, query) for query in queries), return_exceptions=True)
        await reads.close()
        return list(answers)

    event.listen(db.engine, "begin", begun.append)
    find = functools.partial(find_job, db, "one")
    assert asyncio.run(go(find, find, find)) == [find()] * 3
    assert len(begun) == 2, "the three, and the one to compare with"
    first, refused, last = asyncio.run(go(find, refuse, find))
    assert first == last == find() and isinstance(refused, (DBAPIError, ZeroDivisionError))
    first, stopped, last = asyncio.run(go(find, lambda: next(iter(())), find))
    assert first == last == find() and isinstance(stopped, RuntimeError), "a future takes no StopIteration"


def test_of_a_task_that_was_cut_off_before_its_turn_nothing_is_written(db: Database) -> None:
    """Its job's next task may bring the same lines: both in one transaction would be stored twice."""

    async def go() -> None:
        commits, wait = Commits(), threading.Event()
        first = asyncio.create_task(commits.write(db, insert("first", wait=wait), what="first"))
        await asyncio.sleep(0)
        cut = asyncio.create_task(commits.write(db, insert("cut"), what="cut"))
        other = asyncio.create_task(commits.write(db, insert("other"), what="other"))
        await asyncio.sleep(0)
        cut.cancel()
        wait.set()
        await asyncio.gather(first, other)
        await commits.close()

    asyncio.run(go())
    assert set(list_ids(db)) == {"first", "other"}


def test_where_all_that_wait_were_cut_off_nothing_is_begun(db: Database) -> None:
    """An empty transaction waits for the one writer too."""
    begun = list[object]()

    async def go() -> None:
        commits, wait = Commits(), threading.Event()
        first = asyncio.create_task(commits.write(db, insert("first", wait=wait), what="first"))
        await asyncio.sleep(0)
        cut = asyncio.create_task(commits.write(db, insert("cut"), what="cut"))
        await asyncio.sleep(0)
        cut.cancel()
        wait.set()
        await first
        await commits.close()
        assert await commits.write(db, insert("later"), what="later") == "later", "and the next is done as before"

    event.listen(db.engine, "begin", begun.append)
    asyncio.run(go())
    assert len(begun) == 2
