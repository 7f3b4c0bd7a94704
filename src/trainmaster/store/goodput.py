"""Histories of jobs for the goodput ledger: all of them in one pass over the rows, however many there are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Text, func, or_, select, type_coerce

from trainmaster.api.codec import fill
from trainmaster.core.errors import JobUnreadable
from trainmaster.core.money.cost import Span, Window
from trainmaster.core.money.goodput.history import AttemptHistory, History, Mark, StageChange, to_us
from trainmaster.core.plan import EVENTS_FILE
from trainmaster.core.states import Stage, Status
from trainmaster.store import costs
from trainmaster.store import tables as t
from trainmaster.store.columns import Sound, word
from trainmaster.store.rows import read_each

_J, _A, _E, _M, _I = t.jobs.c, t.attempts.c, t.events.c, t.transitions.c, t.instances.c
_RUN = func.coalesce(Sound(_J.spec)["resume_from"].as_string(), _J.id)  # the job that began its run
# Events that the ledger does not read (core/money/goodput/bins.py): heartbeats above all, of which there are the most.
_LEFT_OUT = ("HEARTBEAT", "EVAL_MODEL", "GROUP_ITERATION", "ITERATION")
_LEFT_OUT_EVENTS = ("check", "bound", "rejected", "skipped")
_EMPTY: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHistory:
    """A job and its history, with what it is charged by attempt number. `run`: the job that began its run."""

    id: str
    name: str
    project: str
    target: str
    status: Status
    run: str
    created_at: datetime
    history: History
    charges: Mapping[int, Sequence[Span]]
    priced: bool  # every part of its cost is known


def list_histories(
    conn: Connection,
    *,
    jobs: Collection[str] = (),
    project: str | None = None,
    window: Window | None = None,
    free: Collection[str] = (),
    only_open: bool = False,
) -> Iterator[JobHistory]:
    """Histories of these jobs, or of a project, or of all; of those runs alone that were there in the window.

    `free`: targets whose price of 0 is a default and means that it is unknown. `only_open`: none that is final.
    Jobs of one run come in the order in which they were made; the others in any.
    """
    wanted = _conditions(jobs, project, window)
    if only_open:
        wanted.append(_J.stage.is_not(None))
    rows = {row.id: row for row in read_each(_checked, conn.execute(_jobs(wanted)))}
    if not rows:
        return
    stages, attempts = _stages(conn, wanted), _attempts(conn, wanted)
    charges: dict[str, dict[int, Sequence[Span]]] = {}
    for charge in costs.list_charges(conn, jobs=jobs, project=project):
        charges.setdefault(charge.job_id, {})[int(charge.attempt.rpartition(".")[2])] = charge.spans
    unpriced = costs.list_unpriced(conn, free=free, project=project, jobs=jobs) if free else set()
    runs = Counter(row.first or row.id for row in rows.values())
    later: list[JobHistory] = []  # of runs of several jobs, which need the order in which they were made
    for job_id, marks in _every(rows, _marks(conn, wanted)):
        job = _history(
            rows[job_id],
            stages.get(job_id, ()),
            attempts.get(job_id, ()),
            marks,
            charges.get(job_id, {}),
            unpriced=job_id in unpriced,
        )
        if runs[job.run] > 1:
            later.append(job)
        else:
            yield job
    yield from sorted(later, key=lambda job: (job.run, job.created_at, job.id))


def _conditions(jobs: Collection[str], project: str | None, window: Window | None) -> list[ColumnElement[bool]]:
    wanted: list[ColumnElement[bool]] = [_J.id.in_(sorted(jobs))] if jobs else []
    if project is not None:
        wanted.append(_J.project == project)
    if window is not None:
        there = (_J.created_at < window.end, or_(_J.ended_at.is_(None), _J.ended_at > window.start))
        # With all jobs of a run: what one has trained before the window is repeated work in it.
        wanted.append(_RUN.in_(select(_RUN).where(*there)))
    return wanted


def _every(
    jobs: Collection[str], told: Iterator[tuple[str, dict[int, list[Mark]]]]
) -> Iterator[tuple[str, Mapping[int, Sequence[Mark]]]]:
    """Every job with its events; those without any last."""
    seen: set[str] = set()
    for job_id, marks in told:
        if job_id in jobs:
            seen.add(job_id)
            yield job_id, marks
    yield from ((job_id, {}) for job_id in jobs if job_id not in seen)


def _jobs(wanted: Sequence[ColumnElement[bool]]) -> Any:
    return select(
        _J.id, _J.name, _J.project, _J.target, _J.status, Sound(_J.spec).label("spec"), _J.created_at,
        Sound(_J.spec)["resume_from"].as_string().label("first"),
    ).where(*wanted)  # fmt: skip


def _stages(conn: Connection, wanted: Sequence[ColumnElement[bool]]) -> dict[str, list[StageChange]]:
    query = select(_M.job_id, _M.at, _M.stage_to, _M.stage_from).order_by(_M.id)
    query = query.join(t.jobs, _J.id == _M.job_id).where(*wanted) if wanted else query
    changes: dict[str, list[StageChange]] = {}
    for job_id, at, to, before in conn.execute(query):
        if before is not None:  # the first says only that the job was made
            changes.setdefault(job_id, []).append(StageChange(to_us(at), word(Stage, to)))
    return changes


def _attempts(conn: Connection, wanted: Sequence[ColumnElement[bool]]) -> dict[str, list[AttemptHistory]]:
    rented = select(_I.attempt, _I.gone_at).where(_I.gone_at.is_not(None))
    if wanted:
        rented = rented.join(t.attempts, _A.id == _I.attempt).join(t.jobs, _J.id == _A.job_id).where(*wanted)
    gone: dict[str, int] = {}
    for attempt, at in conn.execute(rented):
        gone[attempt] = max(to_us(at), gone.get(attempt, 0))
    query = select(_A.id, _A.job_id, _A.number, _A.started_at, _A.released_at)
    query = query.join(t.jobs, _J.id == _A.job_id).where(*wanted) if wanted else query
    by_job: dict[str, list[AttemptHistory]] = {}
    for attempt, job_id, number, started, released in conn.execute(query):
        by_job.setdefault(job_id, []).append(
            AttemptHistory(number=number, started=started and to_us(started), released=released and to_us(released),
                           gone=gone.get(attempt))
        )  # fmt: skip
    return by_job


def _marks(conn: Connection, wanted: Sequence[ColumnElement[bool]]) -> Iterator[tuple[str, dict[int, list[Mark]]]]:
    """Events of one job after the other: a walk along the key, in which the attempts of a job are neighbours."""
    plain = conn.dialect.name == "postgresql"
    data = _E.data if plain else type_coerce(_E.data, Text)
    read = select(_E.attempt, _E.ts, _E.phase, _E.event, data)
    query = read.where(_E.stream == EVENTS_FILE, _E.phase.not_in(_LEFT_OUT), _E.event.not_in(_LEFT_OUT_EVENTS))
    if wanted:
        query = query.where(_E.attempt.in_(select(_A.id).join(t.jobs, _J.id == _A.job_id).where(*wanted)))
    query = query.order_by(_E.attempt, _E.offset).execution_options(yield_per=5_000)
    job_id, marks = "", dict[int, list[Mark]]()
    last, of_attempt = "", list[Mark]()
    for attempt, ts, phase, event, value in conn.execute(query):
        if attempt != last:
            last = attempt
            owner, _, number = attempt.rpartition(".")
            if owner != job_id:
                if job_id:
                    yield job_id, marks
                job_id, marks = owner, {}
            of_attempt = marks.setdefault(int(number), [])
        content = value if plain or value is None else json.loads(value)
        of_attempt.append(Mark(to_us(ts) if ts is not None else None, phase, event, content or _EMPTY))
    if job_id:
        yield job_id, marks


def _checked(row: Any) -> Any:
    try:
        _read_sizes(row.spec)
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise JobUnreadable(row.id, row.project) from None  # the cause may repeat values of the spec
    return row


def _read_sizes(spec: Mapping[str, Any]) -> tuple[int, int | None]:
    """GPUs of a job, and the microseconds of silence after which it counts as stalled."""
    resources, limits = spec.get("resources") or {}, spec.get("limits") or {}
    minutes = limits.get("stall_minutes", 30.0)
    gpus = int(resources.get("nodes") or 1) * int(resources.get("processes_per_node") or 1)
    return gpus, round(float(minutes) * 60_000_000) if minutes is not None else None


def _history(
    row: Any,
    stages: Sequence[StageChange],
    attempts: Sequence[AttemptHistory],
    marks: Mapping[int, Sequence[Mark]],
    charges: Mapping[int, Sequence[Span]],
    *,
    unpriced: bool,
) -> JobHistory:
    gpus, stall_us = _read_sizes(row.spec)
    spans = [span for some in charges.values() for span in some]
    default = unpriced and all(span.cents_per_hour == 0 for span in spans)
    return fill(
        JobHistory,
        row,
        status=Status(row.status),
        run=row.first or row.id,
        history=History(
            created=to_us(row.created_at),
            stages=stages,
            attempts=[replace(attempt, marks=marks.get(attempt.number, ())) for attempt in attempts],
            gpus=gpus,
            trainer=row.spec.get("train") is not None,
            stall_us=stall_us,
        ),
        charges=charges,
        priced=all(span.cents_per_hour is not None for span in spans) and not default,
    )
