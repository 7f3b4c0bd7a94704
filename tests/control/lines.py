"""Event lines as seed 004's programs write them, taken in by the real ingest, and all that the rows then say."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from trainmaster.control.ingest import Read, ingest
from trainmaster.core.spec import JobSpec
from trainmaster.store import attempts, jobs, nodes
from trainmaster.store.database import Database
from trainmaster.store.page_rows import iterations
from trainmaster.store.rows import JobRow

IST = ZoneInfo("Asia/Kolkata")
START = datetime(2025, 11, 4, 10, 0, 0)  # noqa: DTZ001 (as their files write it: without an offset)


def line(at_s: float, phase: str, event: str, **more: Any) -> bytes:
    """One line, so many seconds after the start. `data` and the other fields as given."""
    data = {"ts": (START + timedelta(seconds=at_s)).isoformat(), "phase": phase, "event": event, **more}
    return json.dumps(data).encode() + b"\n"


def utc(at_s: float) -> datetime:
    """The same moment as the rows hold it."""
    return (START + timedelta(seconds=at_s)).replace(tzinfo=IST).astimezone(UTC)


def new_job(db: Database) -> tuple[str, str]:
    """A job and its first attempt, which nobody works on."""
    job_id = str(uuid.uuid4())
    with db.write() as conn:
        jobs.insert_job(conn, job_id, JobSpec(name="a", command=("true",)), at=datetime.now(UTC))
        return job_id, attempts.insert_attempt(conn, job_id, 1, handle={}, at=datetime.now(UTC))


def ingest_bytes(db: Database, attempt: str, content: bytes, *, chunk: int = 1 << 20, last: bool = False) -> None:
    """One pass of the ingest over a file that holds this now."""

    async def read(offset: int, limit: int) -> bytes:
        return content[offset : offset + limit]

    typed: Read = read
    assert asyncio.run(ingest(db, attempt, typed, zone=IST, chunk=chunk, last=last))


def said(db: Database, *lines: bytes) -> str:
    """The id of a new job that wrote these lines."""
    job_id, attempt = new_job(db)
    ingest_bytes(db, attempt, b"".join(lines))
    return job_id


def job_of(db: Database, job_id: str) -> JobRow:
    row = jobs.find_job(db, job_id)
    assert row is not None
    return row


def records(db: Database, job_id: str) -> dict[str, Any]:
    """All that the rows of a job say of its training, without the numbers of rows and places in the file."""
    job = job_of(db, job_id)
    numbers = {row.id: row.number for row in iterations.list_iterations(db, job_id)}
    epochs = [row for key in numbers for row in iterations.list_epochs(db, key)]
    evals = iterations.list_evals(db, job_id=job_id, limit=1000)

    def plain(rows: Iterable[Any]) -> list[dict[str, Any]]:
        found = []
        for row in rows:
            values = asdict(row)
            for name in ("id", "job_id", "attempt", "offset"):
                values.pop(name, None)
            if "iteration_id" in values:
                values["iteration"] = numbers[values.pop("iteration_id")]
            found.append(values)
        return sorted(found, key=lambda values: json.dumps(values, sort_keys=True, default=str))

    return {
        "job": (job.project_started_at, job.time_taken, job.training_config),
        "iterations": plain(iterations.list_iterations(db, job_id)),
        "steps": plain(iterations.list_steps(db, job_id)),
        "epochs": plain(epochs),
        "evals": plain(evals),
        "checks": plain(nodes.list_checks(db, job_id)),
    }
