"""Trials of a search as rows: what a run reports, and how it ends, without a target."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from trainmaster.control.queueing import searching, study
from trainmaster.core.events import split
from trainmaster.core.plan import EVENTS_FILE
from trainmaster.core.states import Stage, Status
from trainmaster.store import attempts, events, jobs
from trainmaster.store.capacity import searches
from trainmaster.store.database import Database

Told = tuple[int, Any]  # step, value


def report(db: Database, job_id: str, *told: Told, attempt: int = 1, phase: str = "STEP", name: str = "loss") -> None:
    """The job's next event lines."""
    lines = [{"phase": phase, "event": "metrics", "data": {"step": step, name: value}} for step, value in told]
    raw = "".join(json.dumps(line) + "\n" for line in lines).encode()
    known = {row.number: row.id for row in attempts.list_attempts(db, job_id)}
    with db.write() as conn:
        at = datetime.now(UTC)
        made = known.get(attempt) or attempts.insert_attempt(conn, job_id, attempt, handle={}, at=at)
    offset = events.find_stream(db, made, EVENTS_FILE).offset
    with db.write() as conn:
        parts = split(raw, offset=offset, zone=UTC, last=True)
        assert events.append_events(conn, made, EVENTS_FILE, seen_offset=offset, lines=parts)


def end(db: Database, job_id: str, status: Status = Status.COMPLETED) -> None:
    with db.write() as conn:
        assert jobs.finish(conn, job_id, seen=Stage.QUEUED, status=status, at=datetime.now(UTC))


def list_open(db: Database, set_id: str) -> list[searches.SearchTrial]:
    """Trials whose job is not final."""
    found = []
    for trial in searches.list_trials(db, set_id):
        job = jobs.find_job(db, trial.job_id) if trial.job_id else None
        if job is not None and not job.status.final:
            found.append(trial)
    return found


def list_results(db: Database, set_id: str) -> list[tuple[Any, ...]]:
    """What two runs of one search have to agree on."""
    return [
        (trial.number, dict(trial.values), trial.state, trial.value, trial.step)
        for trial in searches.list_trials(db, set_id)
    ]


def find_deviations(db: Database, set_id: str) -> list[str]:
    """Trials that Optuna does not propose when it is asked again with what each of them saw, by the recorded turns."""
    found = searches.find_search(db, set_id)
    assert found is not None
    trials: Sequence[searches.SearchTrial] = searches.list_trials(db, set_id)
    wrong = []
    for trial in trials:
        seen = [
            searching.see_for_proposal(other)
            if other.ended is not None and other.ended < trial.proposed
            else study.Seen(values=other.values)
            for other in trials[: trial.number - 1]
        ]
        if (again := study.propose(found.search, seen)) != trial.values:
            wrong.append(f"trial {trial.number} is {dict(trial.values)}, and would be {again}")
    return wrong
