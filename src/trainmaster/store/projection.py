"""What the lines say of the training becomes rows, in the transaction that keeps the lines: exactly once with them.

A row of the training depends on which events there are, and not on the order in which they came: what several events
tell together (when a thing began, ended, how long it took, with which config) is told anew from all of them whenever
one is added. They are few: starts and ends. An epoch and a check are told by one event each; told again, the one with
the later time stands. A line without an iteration belongs to iteration 1, as everything does that our trainer writes.

What does depend on the order of the lines: the numbers of rows, an evaluation's offset, and which of two events about
the same epoch or check stands that have the same time or none (the later line).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Table, and_, insert, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from trainmaster.core.events import Event, Line
from trainmaster.core.results import Verdict
from trainmaster.store import tables as t

# Phases whose starts and ends are one step of an iteration.
_STEPS = {"TRAJECTORY": "traj_gen", "TRAINING": "training", "EVAL_TRAINING": "evaluation"}
_LONGEST_S = 1e12  # more is no duration, and sums of it would leave what a float holds
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """An event and where it was said."""

    conn: Connection
    job_id: str
    attempt: str
    stream: str
    offset: int
    event: Event

    @property
    def data(self) -> Mapping[str, Any]:
        return self.event.data

    @property
    def ts(self) -> datetime | None:
        return self.event.ts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """The starts and ends of one thing, each in the order of attempts and times."""

    starts: Sequence[Any]  # rows of `events`
    ends: Sequence[Any]

    @property
    def began(self) -> datetime | None:
        return min((row.ts for row in self.starts if row.ts is not None), default=None)

    @property
    def ended(self) -> datetime | None:
        return max((row.ts for row in self.ends if row.ts is not None), default=None)

    @property
    def between(self) -> float | None:
        """Seconds from the first start to the last end, for ends that do not say."""
        if self.began is None or self.ended is None:
            return None
        return max(0.0, (self.ended - self.began).total_seconds())

    @property
    def seconds(self) -> list[float]:
        """What the ends say of how long it took."""
        return [found for row in self.ends if (found := _seconds(row.data or {})) is not None]

    @property
    def config(self) -> dict[str, Any] | None:
        """The newest that a start says."""
        return next((found for row in reversed(self.starts) if (found := _config(row.data or {}))), None)


def project(conn: Connection, attempt: str, stream: str, lines: Iterable[Line], *, job_id: str | None = None) -> None:
    """Take what these lines say into the rows of their job. The lines themselves are in `events` already."""
    events = [(line.offset, line.event) for line in lines if line.event is not None and line.event.phase in _PHASES]
    if not events:
        return
    if job_id is None:
        job_id = str(conn.execute(select(t.attempts.c.job_id).where(t.attempts.c.id == attempt)).scalar_one())
    changed: dict[tuple[str, int | None], None] = {}  # in the order in which they were first spoken of
    for offset, event in events:
        if (rule := _RULES.get((event.phase, event.event))) is not None:
            rule(_Said(conn=conn, job_id=job_id, attempt=attempt, stream=stream, offset=offset, event=event))
        elif event.event in ("start", "end") and event.phase in _RETELL:
            whole = event.phase in ("PROJECT", "GROUP_ITERATION")
            changed[event.phase, None if whole else _number_of(event.iteration, event.data)] = None
    for phase, number in changed:
        told = _tell(conn, job_id, stream, phase, number)
        _RETELL[phase](conn, job_id, phase, number, told)


def _tell(conn: Connection, job_id: str, stream: str, phase: str, number: int | None) -> _Told:
    """All starts and ends of a phase, of one iteration where a number is given, over the attempts of a job."""
    e, a = t.events.c, t.attempts.c
    attempts = {row.id: row.number for row in conn.execute(select(a.id, a.number).where(a.job_id == job_id))}
    query = select(e.attempt, e.ts, e.seq, e.event, e.iteration, e.data).where(
        e.attempt.in_(attempts), e.stream == stream, e.phase == phase, e.event.in_(("start", "end"))
    )
    if number is not None:
        query = query.where(or_(e.iteration == number, e.iteration.is_(None)))
    rows = [row for row in conn.execute(query) if number is None or _number_of(row.iteration, row.data or {}) == number]
    # The content last: two events of one moment are told in the same order however they came.
    rows.sort(
        key=lambda row: (
            attempts[row.attempt],
            row.ts or _LONG_AGO,
            -1 if row.seq is None else row.seq,
            json.dumps(row.data, sort_keys=True),
        )
    )
    return _Told(starts=[row for row in rows if row.event == "start"], ends=[row for row in rows if row.event == "end"])


def _retell_project(conn: Connection, job_id: str, _phase: str, _number: int | None, told: _Told) -> None:
    taken = told.seconds[-1] if told.seconds else told.between
    values = {"project_started_at": told.began, "time_taken": taken}
    conn.execute(update(t.jobs).where(t.jobs.c.id == job_id).values(values))


def _retell_group(conn: Connection, job_id: str, _phase: str, _number: int | None, told: _Told) -> None:
    conn.execute(update(t.jobs).where(t.jobs.c.id == job_id).values(training_config=told.config))


def _retell_iteration(conn: Connection, job_id: str, _phase: str, number: int | None, told: _Told) -> None:
    values = {
        "started_at": told.began,
        "completed_at": told.ended,
        "config": told.config,
        "time_taken": told.seconds[-1] if told.seconds else told.between,
    }
    _upsert(conn, t.iterations, {"job_id": job_id, "number": number}, values)


def _retell_step(conn: Connection, job_id: str, phase: str, number: int | None, told: _Told) -> None:
    iteration = _upsert(conn, t.iterations, {"job_id": job_id, "number": number}, {})
    values = {
        "started_at": told.began,
        "completed_at": told.ended,
        "config": told.config,
        # Together: several evaluations of one iteration, or a training that was resumed. fsum, because plain sums of
        # the same numbers differ with their order.
        "step_time": math.fsum(told.seconds) if told.seconds else told.between,
    }
    _upsert(conn, t.steps, {"iteration_id": iteration, "kind": _STEPS[phase]}, values)


_RETELL: Mapping[str, Callable[[Connection, str, str, int | None, _Told], None]] = {
    "PROJECT": _retell_project,
    "GROUP_ITERATION": _retell_group,
    "ITERATION": _retell_iteration,
    **dict.fromkeys(_STEPS, _retell_step),
}


def _epoch(said: _Said) -> None:
    number = said.event.epoch if said.event.epoch is not None else _whole(said.data.get("epoch"))
    if number is None:
        return  # an epoch that has no number is kept as an event and cannot be a row
    _upsert_newest(
        said.conn,
        t.epochs,
        {"iteration_id": _iteration(said), "number": number},
        {
            "avg_loss": _number(said.data.get("avg_loss")),
            "model_path": _text(said.data.get("model_path")),
            "optimizer_path": _text(said.data.get("optimizer_path")),
            "metrics": dict(said.data),
            "at": said.ts,
            "attempt": said.attempt,
        },
    )


_NEW_EVAL = insert(t.evals)


def _eval(said: _Said) -> None:
    metrics = said.data.get("metrics")
    values = {
        "job_id": said.job_id,
        "iteration_id": _iteration(said),
        "model_id": _text(said.data.get("model_id")) or _text(said.data.get("model_path")),
        "metrics": dict(metrics) if isinstance(metrics, Mapping) else dict(said.data),
        "at": said.ts,
        "attempt": said.attempt,
        "stream": said.stream,
        "offset": said.offset,
    }
    said.conn.execute(_NEW_EVAL, values)


def _check(said: _Said) -> None:
    name, verdict = _text(said.data.get("check")), said.data.get("verdict")
    if name is None or verdict not in list(Verdict):
        return
    node = _text(said.data.get("node")) or _text(said.event.extra.get("node")) or _host(said) or "0"
    _upsert_newest(
        said.conn,
        t.check_results,
        {"attempt": said.attempt, "node": node, "check": name[:64]},
        {
            "verdict": str(verdict),
            "took_s": _number(said.data.get("took_s")),
            "findings": said.data.get("findings"),
            "at": said.ts,
        },
    )


def _host(said: _Said) -> str | None:
    """The machine that wrote this stream, as its agent said at its start: a check does not say where it ran."""
    e = t.events.c
    start = (e.attempt == said.attempt, e.stream == said.stream, e.phase == "PROJECT", e.event == "start")
    data = said.conn.execute(select(e.data).where(*start).order_by(e.offset).limit(1)).scalar_one_or_none()
    return _text((data or {}).get("host"))


_RULES: Mapping[tuple[str, str], Callable[[_Said], None]] = {
    ("TRAINING", "epoch_complete"): _epoch,
    ("EVAL_MODEL", "metrics"): _eval,
    ("PREFLIGHT", "check"): _check,
}
_PHASES = frozenset(_RETELL) | {phase for phase, _ in _RULES}


def _iteration(said: _Said) -> int:
    """The id of the iteration an event belongs to, which is made where it is not there yet."""
    number = _number_of(said.event.iteration, said.data)
    return _upsert(said.conn, t.iterations, {"job_id": said.job_id, "number": number}, {})


def _number_of(stated: int | None, data: Mapping[str, Any]) -> int:
    number = stated if stated is not None else _whole(data.get("iteration"))
    return 1 if number is None else number


def _upsert(conn: Connection, table: Table, key: Mapping[str, Any], values: Mapping[str, Any]) -> int:
    """The row with this key, made or changed; its id."""
    made = _upsert_query(conn.dialect.name, table, tuple(key), tuple(values))
    return int(conn.execute(made, {**key, **values}).scalar_one())


@functools.cache
def _upsert_query(dialect: str, table: Table, key: Sequence[str], values: Sequence[str]) -> Any:
    row = _insert(dialect, table)
    # With nothing to change, the key is set to itself: a row that is left alone would not give its id back.
    changes = {name: row.excluded[name] for name in (values or key)}
    return row.on_conflict_do_update(index_elements=key, set_=changes).returning(table.c.id)


def _upsert_newest(conn: Connection, table: Table, key: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """The row with this key, made, or changed unless what it holds was said at a later time of the same attempt."""
    conn.execute(_upsert_newest_query(conn.dialect.name, table, tuple(key), tuple(values)), {**key, **values})


@functools.cache
def _upsert_newest_query(dialect: str, table: Table, key: Sequence[str], values: Sequence[str]) -> Any:
    row = _insert(dialect, table)
    old, new = table.c, row.excluded
    newer = or_(old.attempt != new.attempt, old.at.is_(None), and_(new.at.is_not(None), new.at >= old.at))
    return row.on_conflict_do_update(index_elements=key, set_={name: new[name] for name in values}, where=newer)


def _insert(dialect: str, table: Table) -> Any:
    return (sqlite if dialect == "sqlite" else postgresql).insert(table)


def _config(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a start says it starts with: its `config`, or all of it."""
    for name in ("config", "step_config", "training_config"):
        if isinstance(data.get(name), Mapping):
            return dict(data[name])
    return dict(data) or None


def _seconds(data: Mapping[str, Any]) -> float | None:
    for name in ("time_taken", "duration", "duration_s", "step_time"):
        found = _number(data.get(name))
        if found is not None and 0 <= found <= _LONGEST_S:
            return found
    return None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _text(value: object) -> str | None:
    return str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) and value != "" else None
