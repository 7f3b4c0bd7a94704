"""Many running jobs are listened to together: the rows are those of each listened to alone."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import event
from sqlalchemy.exc import IntegrityError

from sims.timed_target import LINE_BYTES, Place, parse
from store.rows import list_open
from trainmaster.control import reconcile
from trainmaster.control import submit as submitting
from trainmaster.control.commits import GroupCommit
from trainmaster.control.context import Context
from trainmaster.control.tail import Tail
from trainmaster.core.events import split
from trainmaster.core.plan import EVENTS_FILE
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Stage, Status, TargetState
from trainmaster.storage import open_store
from trainmaster.store import attempts, leases
from trainmaster.store.database import Database
from trainmaster.store.events import Chunk, append_chunks, append_events, find_stream, list_events
from trainmaster.store.jobs import advance, find_job, insert_job, mark_stalled, request_cancel
from trainmaster.store.page_rows import iterations
from trainmaster.store.rows import AttemptRow, JobRow
from trainmaster.targets import Submission

SPEC = parse_spec({"name": "many", "target": "sim", "command": ["true"], "preflight": {"level": 0}})
CHECKED = parse_spec({"name": "many", "target": "sim", "command": ["true"], "preflight": {"level": 1}})
LINES = [
    b'{"phase":"TRAINING","event":"start","data":{"ranks":1}}\n',
    b'{"phase":"TRAINING","event":"epoch_complete","epoch":1,"data":{"avg_loss":2.5}}\n{"phase":"STEP"}\nrubbish\n',
    b'{"phase":"HEARTBEAT","event":"alive"}\n',
]


def insert_running(db: Database) -> str:
    job_id, at = str(uuid.uuid4()), datetime.now(UTC)
    with db.write() as conn:
        insert_job(conn, job_id, SPEC, at=at)
        attempts.insert_attempt(conn, job_id, 1, handle={"attempt": f"{job_id}.1"}, at=at)
        advance(conn, job_id, seen=Stage.QUEUED, to=Stage.RUNNING, at=at)
    return job_id


def chunk(job_id: str, raw: bytes, *, offset: int) -> Chunk:
    lines = split(raw, offset=offset, zone=UTC)
    return Chunk(job_id=job_id, attempt=f"{job_id}.1", lines=lines, inside=False)


def rows(db: Database, job_id: str) -> object:
    events = [(row.offset, row.phase, row.data, row.text) for row in list_events(db, job_id)]
    epochs = [
        (epoch.number, epoch.avg_loss)
        for iteration in iterations.list_iterations(db, job_id)
        for epoch in iterations.list_epochs(db, iteration.id)
    ]
    job = find_job(db, job_id)
    assert job is not None
    return events, epochs, find_stream(db, f"{job_id}.1", EVENTS_FILE).offset, job.heard_at is not None


def append(db: Database, chunks: Sequence[Chunk]) -> list[bool]:
    with db.write() as conn:
        return append_chunks(conn, chunks)


def test_lines_of_many_jobs_are_kept_as_those_of_one(db: Database) -> None:
    together, alone = [insert_running(db) for _ in range(3)], insert_running(db)
    offset = 0
    for raw in LINES:
        assert append(db, [chunk(job_id, raw, offset=offset) for job_id in together]) == [True] * 3
        with db.write() as conn:
            lines = split(raw, offset=offset, zone=UTC)
            assert append_events(conn, f"{alone}.1", EVENTS_FILE, seen_offset=offset, lines=lines)
        offset += len(raw)
    assert [rows(db, job_id) for job_id in together] == [rows(db, alone)] * 3


def test_records_of_many_jobs_take_as_many_statements_as_those_of_one(db: Database) -> None:
    asked: list[str] = []

    def note(_conn: object, _cursor: object, statement: str, *_more: object) -> None:
        asked.append(statement)

    def count(job_ids: Sequence[str]) -> list[int]:
        counts, offset = list[int](), 0
        for raw in (b'{"phase":"PROJECT","event":"start","data":{"host":"a"}}\n', *LINES):
            asked.clear()
            append(db, [chunk(job_id, raw, offset=offset) for job_id in job_ids])
            counts.append(len(asked))
            offset += len(raw)
        return counts

    event.listen(db.engine, "before_cursor_execute", note)
    alone, together = [insert_running(db)], [insert_running(db) for _ in range(20)]
    assert count(together) == count(alone)
    assert [rows(db, job_id) for job_id in together] == [rows(db, alone[0])] * 20


def test_two_streams_of_one_job_come_together_and_each_counts(db: Database) -> None:
    """As of two attempts, where one was read late."""
    job_id, at = insert_running(db), datetime.now(UTC)
    with db.write() as conn:
        attempts.insert_attempt(conn, job_id, 2, handle={"attempt": f"{job_id}.2"}, at=at)
    end = b'{"phase":"TRAINING","event":"end","data":{"time_taken":2.5}}\n'
    lines = split(end, offset=0, zone=UTC)
    both = [Chunk(job_id=job_id, attempt=f"{job_id}.{number}", lines=lines) for number in (1, 2)]
    assert append(db, both) == [True, True]
    assert [(step.kind, step.step_time) for step in iterations.list_steps(db, job_id)] == [("training", 5.0)]


def test_a_reader_that_was_second_keeps_nothing_and_harms_nobody(db: Database) -> None:
    first, second = insert_running(db), insert_running(db)
    assert append(db, [chunk(first, LINES[1], offset=0), chunk(second, LINES[1], offset=0)]) == [True, True]
    before, end = rows(db, first), len(LINES[1])
    assert append(db, [chunk(first, LINES[1], offset=0), chunk(second, LINES[0], offset=end)]) == [False, True]
    assert rows(db, first) == before
    assert find_stream(db, f"{second}.1", EVENTS_FILE).offset == end + len(LINES[0])


def test_lines_that_come_together_are_committed_together_or_not_at_all(db: Database) -> None:
    good, stranger = insert_running(db), str(uuid.uuid4())

    async def go(*job_ids: str) -> list[bool | BaseException]:
        group = GroupCommit()
        return await asyncio.gather(
            *(group.append(db, chunk(job_id, LINES[1], offset=0)) for job_id in job_ids), return_exceptions=True
        )

    assert [type(answer) for answer in asyncio.run(go(good, stranger))] == [IntegrityError] * 2
    assert rows(db, good) == ([], [], 0, False)
    assert asyncio.run(go(good)) == [True]


def test_jobs_that_run_are_listened_to_until_each_has_ended_its_own_way(db: Database, tmp_path: Path) -> None:
    place = Place(parse("run_s=3,event_s=0.2,fail=0.3,vanish=0.2,seed=3"))
    jobs = [submitting.submit(db, SPEC, load=place.load).id for _ in range(12)]

    async def go() -> None:
        stop = asyncio.Event()
        task = asyncio.create_task(reconcile.run(db, tmp_path, stop=stop, tick_s=0.1, load=place.load))
        async with asyncio.timeout(120):
            while await asyncio.to_thread(list_open, db):  # noqa: ASYNC110 (rows do not call back)
                await asyncio.sleep(0.1)
        stop.set()
        await task

    asyncio.run(go())
    rows = [find_job(db, job_id) for job_id in jobs]
    ends = {(job.status, job.reason) for job in rows if job is not None}
    assert ends <= {
        (Status.COMPLETED, None),
        (Status.FAILED, Reason.SCRIPT_FAILED),
        (Status.FAILED, Reason.NODE_LOST),
    }
    for job_id in jobs:
        offsets = [row.offset for row in list_events(db, job_id)]
        assert offsets == [number * LINE_BYTES for number in range(len(offsets))] and offsets


def test_only_jobs_of_which_nothing_else_is_wanted_are_merely_listened_to(db: Database) -> None:
    quiet, cancelled, stopped, stalled = (insert_running(db) for _ in range(4))
    token, at = str(uuid.uuid4()), datetime.now(UTC)
    with db.write() as conn:
        leases.take(conn, token, owner="a test")
        request_cancel(conn, cancelled, at=at)
        attempts.request_stop(conn, f"{stopped}.1", reason=Reason.OVER_BUDGET, message="enough", at=at)
        mark_stalled(conn, stalled, at=at)
    assert [row.job_id for row in leases.list_running(db, token)] == [quiet]
    assert leases.list_running(db, str(uuid.uuid4())) == []


def test_a_job_that_is_checked_takes_a_step_when_its_checks_have_ended_and_not_at_every_tick(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, steps = Place(parse("run_s=600,event_s=2")), list[Stage | None]()
    job_id = submitting.submit(db, CHECKED, load=place.load).id
    handle_stage = reconcile.handle_stage

    async def count(context: Context, job: JobRow, attempt: AttemptRow | None) -> bool:
        steps.append(job.stage)
        return await handle_stage(context, job, attempt)

    monkeypatch.setattr(reconcile, "handle_stage", count)

    def is_running() -> bool:
        job = find_job(db, job_id)
        return job is not None and job.stage is Stage.RUNNING

    async def go() -> None:
        stop = asyncio.Event()
        task = asyncio.create_task(reconcile.run(db, tmp_path, stop=stop, tick_s=0.05, load=place.load))
        async with asyncio.timeout(120):
            while not await asyncio.to_thread(is_running):  # noqa: ASYNC110 (rows do not call back)
                await asyncio.sleep(0.05)
        stop.set()
        await task

    asyncio.run(go())
    # One when it was submitted, one for the end of its checks; at 20 ticks a second more than 40 ticks go by.
    assert steps.count(Stage.CHECKING) == 2


def test_the_end_of_the_checks_is_seen_again_where_the_step_after_it_was_cut_off(db: Database, tmp_path: Path) -> None:
    job_id, token, at, clock = str(uuid.uuid4()), str(uuid.uuid4()), datetime.now(UTC), [1e9]
    place = Place(parse("run_s=600,event_s=2"), now=lambda: clock[0])
    handle = {"attempt": f"{job_id}.1"}
    with db.write() as conn:
        insert_job(conn, job_id, CHECKED, at=at)
        attempt = attempts.insert_attempt(conn, job_id, 1, handle=handle, at=at)
        advance(conn, job_id, seen=Stage.QUEUED, to=Stage.CHECKING, at=at)
        attempts.record_poll(conn, attempt, TargetState.RUNNING, at=at)
        leases.take(conn, token, owner="a test")
    context = Context(db=db, home=tmp_path, load=place.load, token=token, storage=open_store(tmp_path / "storage"))

    async def visit(tail: Tail) -> tuple[bool, int]:
        (row,) = leases.list_running(db, token)
        assert row.stage is Stage.CHECKING
        return await tail.poll(row), len(list_events(db, job_id))

    async def go() -> None:
        await place.submit(Submission(handle=handle, files={}, commands=()))
        tail = Tail(context, tick_s=0.05)
        assert await visit(tail) == (False, 0)
        clock[0] += 2.0  # PROJECT start: of no interest to a step
        assert await visit(tail) == (False, 1)
        clock[0] += 2.0  # PREFLIGHT end
        assert await visit(tail) == (True, 2)
        assert await visit(tail) == (True, 2), "no line is new, and the step was never taken"
        assert await visit(Tail(context, tick_s=0.05)) == (True, 2), "the same after a kill"

    asyncio.run(go())
