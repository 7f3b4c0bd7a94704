"""A job page from a folder instead of the database: an attempt's own (events.jsonl, plan.json, exit.json), or a job's.

For a run whose control plane is gone or never was. Only the event file must be there; `global.json` is read too.
"""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from pathlib import Path

from trainmaster.api.events import Event
from trainmaster.api.jobs import JobPage
from trainmaster.api.run import IterationSummary
from trainmaster.core.errors import SpecError, UsageError
from trainmaster.core.events import Line, parse_time, split
from trainmaster.core.files import read_small
from trainmaster.core.plan import EVENTS_FILE, EXIT_FILE, PLAN_FILE, ExitRecord, Plan
from trainmaster.core.spec import JobSpec, zone_of
from trainmaster.core.states import Reason, Stage, Status, TargetState
from trainmaster.pages.job import build
from trainmaster.pages.parts import iteration_summary
from trainmaster.pages.parts.run_summary import RunSummary
from trainmaster.store import jobs
from trainmaster.store.attempts import insert_attempt
from trainmaster.store.migrate import open_database
from trainmaster.store.projection import project
from trainmaster.store.rows import AttemptRow, JobRow

_NAMES = (EVENTS_FILE, "global.json")
_CHUNK = 1 << 20  # bytes read at once
_PLAN_BYTES = 64 << 20  # of a plan with its spec and its environment
_LINES = 2_000  # derived at once
_RECORDS = "00000000-0000-4000-8000-000000000000"  # the job's name in the temporary database
_UNKNOWN = JobSpec(name="unknown", command=("unknown",))  # where no plan says what was asked for; never shown


def read_folder(folder: Path, *, now: datetime | None = None) -> JobPage:
    """The page of what lies in the folder; UsageError if there is no event file."""
    now, summary = now or datetime.now(UTC), RunSummary()
    places = _places(folder)
    attempts = [_load(place, number, summary) for number, place in enumerate(places, start=1)]
    first, last = attempts[0], attempts[-1]
    status, reason, message = _judge(last.exit)
    spec = last.spec or first.spec
    job = JobRow(
        id=last.job_id,
        name=spec.name if spec else folder.absolute().name,
        project=spec.project if spec else "–",
        target=spec.target if spec else "–",
        status=status,
        stage=None if status.final else Stage.RUNNING,
        reason=reason,
        message=message,
        spec=spec or _UNKNOWN,
        attempts=len(attempts),
        cancel_requested=False,
        created_at=first.started_at or now,
        started_at=first.started_at,
        ended_at=last.ended_at if status.final else None,
    )
    rows = [_row(attempt, number) for number, attempt in enumerate(attempts, start=1)]
    page = build(
        job=job,
        attempts=rows,
        summary=summary,
        now=now,
        made_by=f"trainmaster report {shlex.quote(str(folder))}",
        iterations=_iterations(places, attempts, now),
    )
    # Without a plan the spec is unknown, and the page leaves it out.
    return page if spec else dataclasses.replace(page, spec=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttemptFiles:
    """The contents of one attempt's folder."""

    job_id: str
    spec: JobSpec | None
    exit: ExitRecord | None
    started_at: datetime | None
    ended_at: datetime | None


def _places(folder: Path) -> list[Path]:
    inside = folder / "attempts"
    numbered = [place for place in inside.iterdir() if place.name.isdigit()] if inside.is_dir() else []
    places = [place for place in sorted(numbered, key=lambda place: int(place.name)) if _events_file(place)]
    if not places and _events_file(folder):
        places = [folder]
    if not places:
        raise UsageError(f"{folder}: there is no {EVENTS_FILE} in it; give an attempt's or a job's folder")
    return places


def _events_file(folder: Path) -> Path | None:
    return next((folder / name for name in _NAMES if (folder / name).is_file()), None)


def _load(folder: Path, number: int, summary: RunSummary) -> _AttemptFiles:
    plan, record = _plan(folder / PLAN_FILE), _exit(folder / EXIT_FILE)
    path = _events_file(folder)
    assert path is not None, "only folders with an event file come here"
    first = last = None
    zone = zone_of(plan.spec if plan else _UNKNOWN, path.name)
    for line in _lines(path, over=record is not None, zone=zone):
        summary.add(_event(line, attempt=f"{folder.name}.{number}"))
        when = line.event.ts if line.event else None
        first, last = first or when, when or last
    ended = parse_time(record.ended_at, zone=UTC) if record else None
    return _AttemptFiles(
        job_id=plan.attempt.rpartition(".")[0] if plan else folder.absolute().name,
        spec=plan.spec if plan else None,
        exit=record,
        started_at=first,
        ended_at=ended or last,
    )


def _iterations(
    places: Sequence[Path], records: Sequence[_AttemptFiles], now: datetime
) -> tuple[IterationSummary, ...]:
    """Iterations as the database would derive them, in a database that lives as long as this call."""
    with tempfile.TemporaryDirectory(prefix="trainmaster-") as folder:
        db = open_database(Path(folder) / "records.db")
        try:
            with db.write() as conn:
                jobs.insert_job(conn, _RECORDS, _UNKNOWN, at=now)
                for number, (place, record) in enumerate(zip(places, records, strict=True), start=1):
                    attempt = insert_attempt(conn, _RECORDS, number, handle=None, at=now)
                    path = _events_file(place)
                    assert path is not None, "it was read before"
                    zone = zone_of(record.spec or _UNKNOWN, path.name)
                    lines = _lines(path, over=record.exit is not None, zone=zone)
                    while some := list(itertools.islice(lines, _LINES)):
                        project(conn, attempt, EVENTS_FILE, some, job_id=_RECORDS)
            return iteration_summary.read(db, _RECORDS, over=records[-1].exit is not None)
        finally:
            db.close()


def _plan(path: Path) -> Plan | None:
    try:
        return Plan.from_json(read_small(path, limit_bytes=_PLAN_BYTES).decode())
    except (OSError, ValueError, SpecError):
        return None


def _exit(path: Path) -> ExitRecord | None:
    """The exit record; None where it cannot be read: success then has no proof."""
    try:
        return ExitRecord.from_json(read_small(path).decode())
    except (OSError, ValueError, SpecError):
        return None


def _lines(path: Path, *, over: bool, zone: tzinfo) -> Iterator[Line]:
    held, start = b"", 0
    with path.open("rb") as source:
        while True:
            got = source.read(_CHUNK)
            held += got
            lines = split(held, offset=start, zone=zone, last=over and not got)
            yield from lines
            end = lines[-1].offset + lines[-1].length if lines else start
            held, start = held[end - start :], end
            if not got:
                return


def _event(line: Line, *, attempt: str) -> Event:
    event = line.event
    return Event(
        attempt=attempt,
        stream=EVENTS_FILE,
        offset=line.offset,
        length=line.length,
        ts=event.ts if event else None,
        seq=event.seq if event else None,
        phase=event.phase if event else None,
        event=event.event if event else None,
        iteration=event.iteration if event else None,
        epoch=event.epoch if event else None,
        data=event.data if event else {},
        extra=event.extra if event else {},
        fault=line.fault,
        text=line.text,
    )


def _judge(record: ExitRecord | None) -> tuple[Status, Reason | None, str]:
    if record is None:
        return Status.RUNNING, None, f"There is no {EXIT_FILE}: it still runs, or ended without a trace."
    if record.ok:
        return Status.COMPLETED, None, record.message
    cancelled = record.reason is Reason.USER_CANCELLED
    return Status.CANCELLED if cancelled else Status.FAILED, record.reason, record.message


def _row(attempt: _AttemptFiles, number: int) -> AttemptRow:
    record = attempt.exit
    return AttemptRow(
        id=f"{attempt.job_id}.{number}",
        job_id=attempt.job_id,
        number=number,
        handle=None,
        report=None if record is None else TargetState.SUCCEEDED if record.ok else TargetState.FAILED,
        reason=record.reason if record else None,
        message=record.message if record else "",
        exit=record,
        created_at=attempt.started_at or datetime.fromtimestamp(0, UTC),
        started_at=attempt.started_at,
        ended_at=attempt.ended_at if record else None,
    )
