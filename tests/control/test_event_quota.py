"""Events of a job have a quota in the database: over it one mark is kept, the job counts as heard, others go on."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC
from pathlib import Path

import pytest

from trainmaster.control import quotas
from trainmaster.control.ingest import ingest
from trainmaster.core.errors import UsageError
from trainmaster.core.events import split
from trainmaster.core.states import Status
from trainmaster.pages.parts.run_summary import RunSummary
from trainmaster.store import attempts, events, jobs
from trainmaster.store.capacity import event_quota
from trainmaster.store.database import Database

from .lines import new_job
from .test_every_stage_ends import finish

LINE = json.dumps({"phase": "STEP", "event": "metrics", "data": {"step": 1, "loss": 2.0}}).encode() + b"\n"


def take(db: Database, attempt: str, content: bytes, *, limit: float, chunk: int = 1 << 20, stream: str = "") -> None:
    async def read(offset: int, count: int) -> bytes:
        return content[offset : offset + count]

    name = stream or "events.jsonl"
    assert asyncio.run(ingest(db, attempt, read, zone=UTC, chunk=chunk, kept_limit=limit, stream=name))


def faults(db: Database, job_id: str) -> list[str | None]:
    return [row.fault for row in events.list_events(db, job_id) if row.fault]


@pytest.mark.both_databases
@pytest.mark.parametrize("chunk", [50, 1 << 20])
def test_what_is_over_the_quota_is_marked_once_and_read_on(db: Database, chunk: int) -> None:
    job_id, attempt = new_job(db)
    limit, content = 10_000, LINE * 200
    for end in (len(content) // 2, len(content) - 7, len(content)):  # the second ends within a line
        take(db, attempt, content[:end], limit=limit, chunk=chunk)
    rows = events.list_events(db, job_id)
    assert faults(db, job_id) == [event_quota.CUT] and rows[-1].fault == event_quota.CUT
    assert rows[-1].offset == (len(rows) - 1) * len(LINE), "it stands where the first line was left out"
    assert 0.8 * limit < event_quota.count_kept(db, attempt) <= limit + 400
    assert events.find_stream(db, attempt, "events.jsonl").offset == len(content), "the job counts as heard"


@pytest.mark.both_databases
def test_a_file_that_is_replaced_over_and_over_adds_no_rows(db: Database) -> None:
    job_id, attempt = new_job(db)
    for number in range(20):
        take(db, attempt, f"{number}".encode() * 100 + LINE * 60, limit=5_000)
    assert faults(db, job_id)[-1] == event_quota.CUT and len(events.list_events(db, job_id)) < 20
    assert event_quota.count_kept(db, attempt) < 6_000


@pytest.mark.both_databases
def test_the_quota_is_of_the_job_and_not_of_a_file(db: Database) -> None:
    job_id, first = new_job(db)
    other_id, other = new_job(db)
    with db.write() as conn:
        job = jobs.find_job(db, job_id)
        assert job is not None
        second = attempts.insert_attempt(conn, job_id, 2, handle={}, at=job.created_at)
    take(db, first, LINE * 10, limit=10_000, stream="events.node-1.jsonl")
    take(db, first, LINE * 10, limit=10_000)
    take(db, second, LINE * 100, limit=10_000)
    take(db, other, LINE * 10, limit=10_000)
    (line,) = split(LINE, offset=0, zone=UTC, last=True)
    kept = 10_000 // event_quota.weigh(line)
    assert len([row for row in events.list_events(db, job_id) if row.fault is None]) == kept - 10
    assert len(events.list_events(db, other_id)) == 10 and faults(db, other_id) == []


@pytest.mark.proof
@pytest.mark.spawns
def test_a_job_that_writes_without_end_leaves_room_and_others_complete(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(quotas.EVENTS_VARIABLE, "0.0005")  # 0.5 MiB
    text = LINE.decode().strip()
    script = f"i=0; while [ $i -lt 400 ]; do i=$((i+1)); for n in 1 2 3 4 5 6 7 8 9 0; do echo '{text}'; done; done"
    job = finish(db, tmp_path, {"command": ["sh", "-c", f'{script} >> "$TRAINMASTER_EVENTS"; sleep 2']})
    assert job.status is Status.COMPLETED
    rows = events.list_events(db, job.id, limit=10_000)
    assert [row.fault for row in rows if row.fault] == [event_quota.CUT] and len(rows) < 2_000
    summary = RunSummary()
    for row in rows:
        summary.add(row)
    assert event_quota.CUT in summary.run().warnings
    after = finish(db, tmp_path, {"command": ["true"]})
    assert after.status is Status.COMPLETED and faults(db, after.id) == []


@pytest.mark.parametrize("text", ["x", "0", "-1", "nan"])
def test_a_quota_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(quotas.EVENTS_VARIABLE, text)
    with pytest.raises(UsageError, match=quotas.EVENTS_VARIABLE):
        quotas.read_events_limit()
