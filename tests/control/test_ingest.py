"""Every line of a file becomes exactly one row, whatever the reads, the restarts and the other readers."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import event
from sqlalchemy.exc import IntegrityError

from trainmaster.api.events import Event
from trainmaster.control.commits import GroupCommit, Reads
from trainmaster.control.ingest import Read, cut, ingest
from trainmaster.core.errors import StoreError
from trainmaster.core.events import split
from trainmaster.core.spec import JobSpec
from trainmaster.store import attempts, events, jobs
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database

pytestmark = pytest.mark.both_databases

LIMIT = 64  # a line's limit in these tests, so that lines beyond it are cheap
STREAM = "events.jsonl"

event_lines = st.builds(
    lambda seq, text: json.dumps({"phase": "STEP", "event": "m", "seq": seq, "x": text}).encode(),
    st.integers(0, 9),
    st.text(max_size=5),
)
files = st.lists(
    event_lines | st.binary(max_size=30) | st.integers(LIMIT - 2, 4 * LIMIT).map(lambda n: b"x" * n), max_size=8
).flatmap(lambda lines: st.sampled_from([b"\n".join(lines), b"\n".join([*lines, b""])]))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """One database for all the examples of a property: each takes a job of its own."""
    database = open_database(tmp_path_factory.mktemp("ingest") / "trainmaster.db")
    yield database
    database.close()


_numbers = itertools.count()


def new_attempt(db: Database) -> tuple[str, str]:
    job_id = f"job-{next(_numbers)}"
    with db.write() as conn:
        jobs.insert_job(conn, job_id, JobSpec(name="a", command=("true",)), at=datetime.now(UTC))
        return job_id, attempts.insert_attempt(conn, job_id, 1, handle={}, at=datetime.now(UTC))


def reader(content: bytes, *, short: list[int] | None = None) -> Read:
    """Read a file that is `content` now; `short` are sizes the answers are cut to, as a slow link would."""
    sizes = itertools.cycle(short) if short else None

    async def read(offset: int, limit: int) -> bytes:
        return content[offset : offset + min(limit, next(sizes) if sizes else limit)]

    return read


def plain(rows: list[Event]) -> list[object]:
    return [(r.offset, r.length, r.phase, r.event, r.seq, r.extra, r.fault, r.text) for r in rows]


def read_at_once(db: Database, content: bytes) -> list[object]:
    job_id, attempt = new_attempt(db)
    done = asyncio.run(ingest(db, attempt, reader(content), zone=UTC, last=True, chunk=1 << 20, line_limit=LIMIT))
    assert done
    return plain(events.list_events(db, job_id))


@pytest.mark.matrix(one_in=3, of="any order and any cut")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(
    content=files,
    looks=st.lists(
        st.tuples(st.integers(0, 700), st.integers(1, 90), st.lists(st.integers(1, 70), min_size=1, max_size=4)),
        max_size=5,
    ),
)
@example(content=b"x" * LIMIT + b"\n" + b"{}\n", looks=[(LIMIT, 7, [7])])  # cut exactly at the limit
@example(content=b"x" * (LIMIT - 1) + b"\n" + b"{}\n", looks=[(LIMIT - 1, 7, [7])])  # the longest line kept whole
@example(content=b"x" * 3 * LIMIT, looks=[(LIMIT + 1, LIMIT, [70]), (2 * LIMIT, 1, [1])])  # never ends
def test_any_reads_and_restarts_give_the_rows_of_the_file_read_at_once(
    shared: Database, content: bytes, looks: list[tuple[int, int, list[int]]]
) -> None:
    """Each look is a new pass (as after a restart) at a file that has grown, with its own chunk and short reads."""
    job_id, attempt = new_attempt(shared)
    for size, chunk, short in sorted(looks):
        asyncio.run(
            ingest(shared, attempt, reader(content[:size], short=short), zone=UTC, chunk=chunk, line_limit=LIMIT)
        )
    for _ in range(2):  # a second pass at the end finds nothing more
        asyncio.run(ingest(shared, attempt, reader(content), zone=UTC, last=True, line_limit=LIMIT))
    rows = events.list_events(shared, job_id)
    assert plain(rows) == read_at_once(shared, content)
    assert [row.offset for row in rows] == [0, *itertools.accumulate(row.length for row in rows)][: len(rows)]
    assert sum(row.length for row in rows) == len(content) == events.find_stream(shared, attempt, STREAM).offset


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(content=st.lists(event_lines | st.binary(max_size=30), max_size=8).map(b"\n".join))
def test_rows_are_the_lines_that_split_gives(shared: Database, content: bytes) -> None:
    job_id, attempt = new_attempt(shared)
    asyncio.run(ingest(shared, attempt, reader(content), zone=UTC, last=True, chunk=11))
    lines = split(content, offset=0, zone=UTC, last=True)
    assert plain(events.list_events(shared, job_id)) == [
        (
            line.offset,
            line.length,
            line.event and line.event.phase,
            line.event and line.event.event,
            line.event and line.event.seq,
            line.event.extra if line.event else {},
            line.fault,
            line.text,
        )
        for line in lines
    ]


def test_half_a_line_waits_until_nobody_writes(db: Database) -> None:
    job_id, attempt = new_attempt(db)
    half = b'{"phase":"A","event":"b"}\n{"phase":"A"'
    assert asyncio.run(ingest(db, attempt, reader(half), zone=UTC))
    assert [row.phase for row in events.list_events(db, job_id)] == ["A"]
    assert asyncio.run(ingest(db, attempt, reader(half), zone=UTC, last=True))
    assert [(row.phase, row.text) for row in events.list_events(db, job_id)] == [("A", None), (None, '{"phase":"A"')]


def test_two_readers_at_once_keep_each_line_once(db: Database) -> None:
    """Both read from the same offset and only then keep what they read; the one who is late changes nothing."""
    job_id, attempt = new_attempt(db)
    content = b'{"phase":"A","event":"b"}\n' * 50

    async def both() -> list[bool]:
        met = asyncio.Barrier(2)

        async def read(offset: int, limit: int) -> bytes:
            if offset == 0:
                await met.wait()
            return content[offset : offset + limit]

        return await asyncio.gather(*(ingest(db, attempt, read, zone=UTC, chunk=200) for _ in range(2)))

    assert sorted(asyncio.run(both())) == [False, True]
    assert [row.offset for row in events.list_events(db, job_id)] == [26 * n for n in range(50)]


def test_lines_of_many_jobs_share_a_transaction_and_what_is_wrong_with_one_is_its_own(db: Database) -> None:
    made, begun = [new_attempt(db) for _ in range(10)], list[object]()
    content = b'{"phase":"TRAINING","event":"start","data":{"ranks":1}}\n{"phase":"STEP","event":"m"}\nrubbish\n'

    async def go(*names: str) -> list[bool | BaseException]:
        reads, group = Reads(), GroupCommit()
        passes = (ingest(db, name, reader(content), zone=UTC, reads=reads, group=group) for name in names)
        return await asyncio.gather(*passes, return_exceptions=True)

    def count_writes(_conn: object, _cursor: object, statement: str, *_more: object) -> None:
        if statement.startswith("UPDATE streams"):
            begun.append(statement)

    event.listen(db.engine, "before_cursor_execute", count_writes)
    asyncio.run(ingest(db, made[0][1], reader(content), zone=UTC))
    assert asyncio.run(go(*(attempt for _, attempt in made[1:6]))) == [True] * 5
    assert len(begun) == 2, "one alone, five together"
    *fine, stranger = asyncio.run(go(*(attempt for _, attempt in made[6:]), "nobody.1"))
    assert fine == [True] * 4 and isinstance(stranger, IntegrityError)
    kept = [plain(events.list_events(db, job_id)) for job_id, _ in made]
    assert len(kept[0]) == 3 and kept == [kept[0]] * 10
    assert [job is not None and job.heard_at is not None for job in (jobs.find_job(db, each) for each, _ in made)] == [
        True
    ] * 10


@pytest.mark.parametrize(("bytes_", "asked"), [(1000, 1), (80_000, 0)])
def test_few_lines_of_many_bytes_take_no_part_in_the_transaction_of_others(
    db: Database, bytes_: int, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job_id, attempt), seen, append = new_attempt(db), list[events.Chunk](), GroupCommit.append

    async def count(group: GroupCommit, db: Database, chunk: events.Chunk) -> bool:
        seen.append(chunk)
        return await append(group, db, chunk)

    monkeypatch.setattr(GroupCommit, "append", count)
    content = b'{"phase":"A","event":"b","data":{"text":"%s"}}\n' % (b"x" * bytes_)
    assert asyncio.run(ingest(db, attempt, reader(content), zone=UTC, reads=Reads(), group=GroupCommit()))
    assert len(seen) == asked and len(list(events.list_events(db, job_id))) == 1


def test_where_the_database_is_away_lines_do_not_wait_for_it_twice(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lose(_group: GroupCommit, _db: Database, _chunk: events.Chunk) -> bool:
        raise StoreError("the database is locked")

    (job_id, attempt), content = new_attempt(db), b'{"phase":"A","event":"b"}\n'
    with monkeypatch.context() as patch:
        patch.setattr(GroupCommit, "append", lose)
        with pytest.raises(StoreError, match="locked"):
            asyncio.run(ingest(db, attempt, reader(content), zone=UTC, reads=Reads(), group=GroupCommit()))
    assert not events.list_events(db, job_id)
    assert asyncio.run(ingest(db, attempt, reader(content), zone=UTC, reads=Reads(), group=GroupCommit()))
    assert len(events.list_events(db, job_id)) == 1


def test_a_reader_cut_off_in_the_middle_loses_nothing(db: Database) -> None:
    job_id, attempt = new_attempt(db)
    content = b'{"phase":"A","event":"b"}\n' * 20
    fuse = itertools.count()

    async def read(offset: int, limit: int) -> bytes:
        if next(fuse) % 3 == 2:
            raise ConnectionResetError
        return content[offset : offset + limit]

    done = False
    while not done:
        try:
            done = asyncio.run(ingest(db, attempt, read, zone=UTC, chunk=30, last=True))
        except ConnectionResetError:
            continue
    assert [row.offset for row in events.list_events(db, job_id)] == [26 * n for n in range(20)]


def test_a_line_that_is_too_long_keeps_a_bounded_text_and_the_lines_behind_it() -> None:
    held = b"y" * (1 << 16)
    (piece,), inside = cut(held, offset=0, zone=UTC, inside=False, last=False, line_limit=1 << 16)
    assert inside and piece.length == 1 << 16 and piece.text is not None and len(piece.text) == 4096
    rest, inside = cut(
        b'y\n{"phase":"A","event":"b"}\n', offset=1 << 16, zone=UTC, inside=True, last=False, line_limit=1 << 16
    )
    assert not inside and [line.event is not None for line in rest] == [False, True]


def test_a_real_file_is_read_through_the_same_path(db: Database, tmp_path: Path) -> None:
    """With the sizes the reconciler uses: a line beyond 8 MiB between two events."""
    path = tmp_path / "events.jsonl"
    good = b'{"phase":"A","event":"b"}\n'
    path.write_bytes(good + b"z" * (9 << 20) + b"\n" + good)

    async def read(offset: int, limit: int) -> bytes:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(limit)

    job_id, attempt = new_attempt(db)
    assert asyncio.run(ingest(db, attempt, read, zone=UTC))
    rows = events.list_events(db, job_id)
    assert [(row.phase, row.length) for row in rows] == [
        ("A", 26),
        (None, 8 << 20),
        (None, (1 << 20) + 1),
        ("A", 26),
    ]


def test_a_sparse_file_is_read_in_few_steps_and_described(db: Database, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(b'{"phase":"STEP","event":"first"}\n')
    with file.open("r+b") as out:
        out.truncate(256 << 20)
    with file.open("ab") as out:
        out.write(b'\n{"phase":"STEP","event":"last"}\n')
    job_id, attempt = new_attempt(db)
    reads, passes = 0, 0

    async def read(offset: int, limit: int) -> bytes:
        nonlocal reads
        reads += 1
        with file.open("rb") as source:
            source.seek(offset)
            return source.read(limit)

    done = False
    while not done:
        done = asyncio.run(ingest(db, attempt, read, zone=UTC, last=True))
        passes += 1
    assert passes == 1 and reads <= 45  # a read of 1 MiB each would be 256
    rows = events.list_events(db, job_id)
    assert [row.event for row in rows if row.event] == ["first", "last"]
    assert "NUL bytes" in str(rows[1].fault) and sum(row.length for row in rows) == file.stat().st_size
