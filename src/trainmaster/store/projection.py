"""Training records derived from events: iterations, their phases, epochs, evaluations and checks.

Of several nodes, the first one's events describe the run; of the others the checks alone are derived.

Written in the transaction that stores the lines, so each line counts once. Incremental: a batch of lines is folded in
memory and merged with the rows it touches. The cost grows with the lines of the batch, not with those of the run.

A row depends on which events there are, not on the order in which they arrive. Starts and ends are merged: the first
start, the last end, the newest config, the newest stated duration (an iteration) or the exact sum of the stated ones (a
phase of an iteration). What a later merge needs beside the row itself is in its `aggregate`. One event describes one
epoch or one check; of several about the same one, the latest time wins. A line without an iteration belongs to
iteration 1.

Three things depend on the order of lines: row numbers, an evaluation's offset, and which of two events about the same
epoch or check wins if they have the same time or none (the later line).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, Table, and_, bindparam, insert, or_, select, update

from trainmaster.core.events import Event, Line
from trainmaster.core.plan import EVENTS_FILE, split_node_file
from trainmaster.core.results import Verdict
from trainmaster.store import tables as t
from trainmaster.store.columns import slices, upsert
from trainmaster.store.spans import Span, read_text, read_whole

# Phases of an iteration, by the phase of their events.
_KINDS = {"TRAJECTORY": "traj_gen", "TRAINING": "training", "EVAL_TRAINING": "evaluation"}
_SPANS = frozenset({"PROJECT", "GROUP_ITERATION", "ITERATION", *_KINDS})
PHASES = _SPANS | {"EVAL_MODEL", "PREFLIGHT"}
_AGENT = "PROJECT of the agent"  # starts and ends that the agent writes itself
_OF_THE_JOB = frozenset({"PROJECT", _AGENT, "GROUP_ITERATION"})
_OF_ANY_NODE = frozenset({"PREFLIGHT"})  # the second and later nodes repeat what the first one states of the run
# Of each job each number, which is more than was named: SQLite uses no index for pairs.
_NAMED = [t.iterations.c[name].in_(bindparam(name, expanding=True)) for name in ("job_id", "number")]
_ITERATIONS = select(t.iterations).where(*_NAMED)
_IDS = select(t.iterations.c.id, t.iterations.c.job_id, t.iterations.c.number).where(*_NAMED)
_STEPS = select(t.steps).where(t.steps.c.iteration_id.in_(bindparam("ids", expanding=True)))
_JOB_COLUMNS = (t.jobs.c.id, t.jobs.c.project_started_at, t.jobs.c.aggregate, t.jobs.c.training_config)
_JOBS = select(*_JOB_COLUMNS).where(t.jobs.c.id.in_(bindparam("jobs", expanding=True))).order_by(t.jobs.c.id)
# Longest text in an index. PostgreSQL refuses an index entry of more than 2,704 bytes, and a character may take four.
_INDEXED_CHARACTERS = 255


class StreamLines(NamedTuple):
    """New lines of one stream, which are in `events` already."""

    attempt: str
    stream: str
    lines: Iterable[Line]
    job_id: str | None  # None: looked up


def project(conn: Connection, attempt: str, stream: str, lines: Iterable[Line], *, job_id: str | None = None) -> None:
    """Merge lines into the records of their job. The lines themselves are in `events` already."""
    project_many(conn, [StreamLines(attempt, stream, lines, job_id)])


def project_many(conn: Connection, streams: Iterable[StreamLines]) -> None:
    """As `project`, for many streams with as many statements as for one."""
    folds: list[_Fold] = []
    for each in streams:
        phases = PHASES if split_node_file(each.stream)[0] == 0 else _OF_ANY_NODE
        events = [(line.offset, line.event) for line in each.lines if line.event and line.event.phase in phases]
        if not events:
            continue
        job_id = each.job_id
        if job_id is None:
            job_id = str(conn.execute(select(t.attempts.c.job_id).where(t.attempts.c.id == each.attempt)).scalar_one())
        if any(fold.job_id == job_id for fold in folds):  # its rows are merged with what the earlier one wrote
            _write(conn, folds)
            folds = []
        fold = _Fold(conn, job_id, each.attempt, each.stream)
        for offset, event in events:
            fold.add(offset, event)
        folds.append(fold)
    if folds:
        _write(conn, folds)


class _Fold:
    """Lines of one stream, folded by the row that they belong to."""

    def __init__(self, conn: Connection, job_id: str, attempt: str, stream: str) -> None:
        self._conn, self.job_id, self._attempt, self._stream = conn, job_id, attempt, stream
        self._attempt_number = int(attempt.rpartition(".")[2])
        self.spans: dict[tuple[str, int | None], Span] = {}
        self.numbers: dict[int, None] = {}  # iterations, in the order in which they were first named
        self.epochs: dict[tuple[int, int], dict[str, Any]] = {}
        self.evals: list[tuple[int, dict[str, Any]]] = []
        self.checks: dict[tuple[str, str], dict[str, Any]] = {}

    def add(self, offset: int, event: Event) -> None:
        phase, name = event.phase, event.event
        if name in ("start", "end") and phase in _SPANS:
            number = None if phase in ("PROJECT", "GROUP_ITERATION") else self._number(event)
            phase = _AGENT if phase == "PROJECT" and _is_of_agent(event) else phase
            span = self.spans.get((phase, number))
            if span is None:
                span = self.spans[phase, number] = Span()
            span.add(name, self._attempt_number, event)
        elif phase == "TRAINING" and name == "epoch_complete":
            self._add_epoch(event)
        elif phase == "EVAL_MODEL" and name == "metrics":
            self._add_eval(offset, event)
        elif phase == "PREFLIGHT" and name == "check":
            self._add_check(event)

    def _number(self, event: Event) -> int:
        number = event.iteration if event.iteration is not None else read_whole(event.data.get("iteration"))
        number = 1 if number is None else number
        self.numbers[number] = None
        return number

    def _add_epoch(self, event: Event) -> None:
        epoch = event.epoch if event.epoch is not None else read_whole(event.data.get("epoch"))
        if epoch is None:
            return  # an epoch without a number stays an event
        data = event.data
        row = {
            "avg_loss": _float(data.get("avg_loss")),
            "model_path": read_text(data.get("model_path")),
            "optimizer_path": read_text(data.get("optimizer_path")),
            "metrics": dict(data),
            "at": event.ts,
            "attempt": self._attempt,
        }
        _put_newest(self.epochs, (self._number(event), epoch), row)

    def _add_eval(self, offset: int, event: Event) -> None:
        data, metrics = event.data, event.data.get("metrics")
        model = read_text(data.get("model_id")) or read_text(data.get("model_path"))
        row = {
            "job_id": self.job_id,
            "model_id": model and bound(model),
            "metrics": dict(metrics) if isinstance(metrics, Mapping) else dict(data),
            "at": event.ts,
            "attempt": self._attempt,
            "stream": self._stream,
            "offset": offset,
        }
        self.evals.append((self._number(event), row))

    def _add_check(self, event: Event) -> None:
        data = event.data
        name, verdict = read_text(data.get("check")), data.get("verdict")
        if name is None or verdict not in list(Verdict):
            return
        node = self._own_node(read_text(data.get("node")) or read_text(event.extra.get("node")))
        row = {
            "attempt": self._attempt,
            "verdict": str(verdict),
            "took_s": _float(data.get("took_s")),
            "findings": data.get("findings"),
            "at": event.ts,
        }
        _put_newest(self.checks, (bound(node), name[:64]), row)

    def _own_node(self, claimed: str | None) -> str:
        """Node of a check: as the event names it where that is a node of this attempt, else the attempt's own host.

        The workload writes into the same file as the agent; it must not set the verdict of another machine.
        """
        host = self._host
        return claimed if claimed is not None and claimed != host and claimed in self._nodes else host

    @functools.cached_property
    def _host(self) -> str:
        """Name of the node that wrote this stream: as its target calls it, else its host name.

        Machines may share a host name, and streams arrive in any order: neither may merge two nodes into one.
        """
        number = split_node_file(self._stream)[0]
        if number < len(self._nodes):
            return str(self._nodes[number])
        host = self._find_host(self._stream) or str(number)
        return f"{host} {number}" if number and host == self._find_host(EVENTS_FILE) else host

    @functools.cached_property
    def _nodes(self) -> list[Any]:
        a = t.attempts.c
        handle = self._conn.execute(select(a.handle).where(a.id == self._attempt)).scalar_one_or_none() or {}
        nodes = handle.get("nodes")
        return nodes if isinstance(nodes, list) else []

    def _find_host(self, stream: str) -> str | None:
        """Host name in an agent's PROJECT start: a check does not state where it ran."""
        e = t.events.c
        start = (e.attempt == self._attempt, e.stream == stream, e.phase == "PROJECT", e.event == "start")
        data = self._conn.execute(select(e.data).where(*start).order_by(e.offset).limit(1)).scalar_one_or_none()
        return read_text((data or {}).get("host"))

    def merge_job(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """New values of the job's row, from what it holds."""
        own, agents = self.spans.get(("PROJECT", None)), self.spans.get((_AGENT, None))
        group = self.spans.get(("GROUP_ITERATION", None))
        aggregate = dict(row["aggregate"] or {})
        values: dict[str, Any] = {}
        if own is not None or agents is not None:
            # What the program states of its project counts; the agent's own start and end stand in where it is silent.
            own, agents = own or Span(), agents or Span()
            own.merge_kept(aggregate.get("program"))
            agents.merge_kept(aggregate.get("agent"))
            aggregate |= {"program": own.kept(began=True), "agent": agents.kept(began=True)}
            seconds = own.newest_s if own.newest_s is not None else agents.newest_s
            values |= {"project_started_at": own.began or agents.began, "time_taken": seconds}
        if group is not None:
            group.merge(began=None, ended=None, config=row["training_config"], kept=aggregate.get("group"))
            aggregate["group"] = group.kept()
            values["training_config"] = group.config
        return {"aggregate": aggregate, **values}


def _write(conn: Connection, folds: Sequence[_Fold]) -> None:
    """Merge the folds of several jobs into their rows."""
    dialect = conn.dialect.name
    _write_jobs(conn, folds)
    ids = _write_iterations(conn, folds)
    _write_phases(conn, folds, ids)
    epochs = [
        {"iteration_id": ids[fold.job_id, number], "number": epoch, **row}
        for fold in folds
        for (number, epoch), row in fold.epochs.items()
    ]
    if epochs:
        conn.execute(_upsert_newest(dialect, t.epochs, ("iteration_id", "number")), epochs)
    if evals := [{"iteration_id": ids[fold.job_id, n], **row} for fold in folds for n, row in fold.evals]:
        conn.execute(insert(t.evals), evals)
    checks = [{"node": node, "check": check, **row} for fold in folds for (node, check), row in fold.checks.items()]
    if checks:
        conn.execute(_upsert_newest(dialect, t.check_results, ("attempt", "node", "check")), checks)


def _write_jobs(conn: Connection, folds: Sequence[_Fold]) -> None:
    stating = {fold.job_id: fold for fold in folds if any(phase in _OF_THE_JOB for phase, _ in fold.spans)}
    changes: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for some in slices(list(stating)):
        for row in conn.execute(_JOBS.with_for_update(), {"jobs": some}).mappings():
            values = stating[row["id"]].merge_job(dict(row))
            named = {f"new_{name}": value for name, value in values.items()}
            changes.setdefault(tuple(values), []).append({"job": row["id"], **named})
    for names, rows in changes.items():
        conn.execute(_change_job(names), rows)


@functools.cache
def _change_job(names: tuple[str, ...]) -> Any:
    j = t.jobs.c
    values = {name: bindparam(f"new_{name}", type_=j[name].type) for name in names}
    return update(t.jobs).where(j.id == bindparam("job")).values(values)


def _write_iterations(conn: Connection, folds: Sequence[_Fold]) -> dict[tuple[str, int], int]:
    """Insert or merge the iterations that the lines name; their ids, by job and number, where a record needs them."""
    names = [(fold.job_id, number) for fold in folds for number in fold.numbers]
    if not names:
        return {}
    own = {
        (fold.job_id, number): span
        for fold in folds
        for (phase, number), span in fold.spans.items()
        if phase == "ITERATION" and number is not None
    }
    known = {
        (row["job_id"], row["number"]): row
        for some in slices(names)
        for row in conn.execute(_ITERATIONS, _name(some)).mappings()
    }
    rows = []
    for name, span in own.items():
        if name in known:
            span.merge_row(dict(known[name]))
        values: dict[str, Any] = {"config": span.config, "started_at": span.began, "completed_at": span.ended}
        values |= {"time_taken": span.newest_s, "aggregate": span.kept()}
        rows.append({"job_id": name[0], "number": name[1], **values})
    dialect = conn.dialect.name
    if rows:
        changed = ("config", "started_at", "completed_at", "time_taken", "aggregate")
        conn.execute(upsert(dialect, t.iterations, ("job_id", "number"), changed), rows)
    bare = [
        {"job_id": job_id, "number": n} for job_id, n in names if (job_id, n) not in own and (job_id, n) not in known
    ]
    if bare:
        conn.execute(upsert(dialect, t.iterations, ("job_id", "number")), bare)
    needed = [
        (fold.job_id, number)
        for fold in folds
        if fold.epochs or fold.evals or any(phase in _KINDS for phase, _ in fold.spans)
        for number in fold.numbers
    ]
    return {name: row["id"] for name, row in known.items()} | {
        (job_id, number): row_id
        for some in slices([name for name in needed if name not in known])
        for row_id, job_id, number in conn.execute(_IDS, _name(some))
    }


def _name(names: Sequence[tuple[str, int]]) -> dict[str, list[Any]]:
    return {"job_id": list({job_id: None for job_id, _ in names}), "number": list({n: None for _, n in names})}


def _write_phases(conn: Connection, folds: Sequence[_Fold], ids: Mapping[tuple[str, int], int]) -> None:
    own = {
        (ids[fold.job_id, number], _KINDS[phase]): span
        for fold in folds
        for (phase, number), span in fold.spans.items()
        if phase in _KINDS and number is not None
    }
    if not own:
        return
    known = {
        (row["iteration_id"], row["kind"]): row
        for some in slices(list(dict.fromkeys(key[0] for key in own)))
        for row in conn.execute(_STEPS, {"ids": some}).mappings()
    }
    rows = []
    for key, span in own.items():
        if key in known:
            span.merge_row(dict(known[key]))
        values: dict[str, Any] = {"config": span.config, "started_at": span.began, "completed_at": span.ended}
        values |= {"step_time": span.total_s, "aggregate": span.kept()}
        rows.append({"iteration_id": key[0], "kind": key[1], **values})
    changed = ("config", "started_at", "completed_at", "step_time", "aggregate")
    conn.execute(upsert(conn.dialect.name, t.steps, ("iteration_id", "kind"), changed), rows)


def _is_of_agent(event: Event) -> bool:
    """Whether the agent wrote a start or end of PROJECT: only it names the attempt and the outcome."""
    return {"attempt", "host"} <= event.data.keys() or {"ok", "reason"} <= event.data.keys()


def bound(text: str, limit: int = _INDEXED_CHARACTERS) -> str:
    """A text short enough for an index: itself, or its beginning and a digest that keeps two long ones apart."""
    if len(text) <= limit:
        return text
    return f"{text[: limit - 17]}~{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _put_newest(rows: dict[Any, dict[str, Any]], key: Any, row: dict[str, Any]) -> None:
    """Keep the row with the latest time; the later line of two with the same time."""
    old = rows.get(key)
    if old is None or old["at"] is None or (row["at"] is not None and row["at"] >= old["at"]):
        rows[key] = row


@functools.cache
def _upsert_newest(dialect: str, table: Table, key: tuple[str, ...]) -> Any:
    """Insert a row, or change it unless the stored one has a later time of the same attempt."""
    changed = tuple(column.name for column in table.c if column.name not in ("id", *key))

    def is_newer(old: Any, new: Any) -> Any:
        later = or_(old.at.is_(None), and_(new.at.is_not(None), new.at >= old.at))
        return later if "attempt" in key else or_(old.attempt != new.attempt, later)

    return upsert(dialect, table, key, changed, where=is_newer)


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def rebuild(conn: Connection, job_id: str) -> int:
    """Delete the records of a job and derive them again from its events; the number of lines read."""
    of_job = select(t.iterations.c.id).where(t.iterations.c.job_id == job_id)
    in_order = select(t.attempts.c.id).where(t.attempts.c.job_id == job_id).order_by(t.attempts.c.number)
    attempts = conn.execute(in_order).scalars().all()
    for table in (t.steps, t.epochs, t.evals):
        conn.execute(table.delete().where(table.c.iteration_id.in_(of_job)))
    conn.execute(t.check_results.delete().where(t.check_results.c.attempt.in_(attempts)))
    for of_jobs in (t.iterations, t.ledger_tallies):
        conn.execute(of_jobs.delete().where(of_jobs.c.job_id == job_id))
    nothing = {"project_started_at": None, "time_taken": None, "training_config": None, "aggregate": None}
    conn.execute(update(t.jobs).where(t.jobs.c.id == job_id).values(nothing))
    count = 0
    e = t.events.c
    for attempt in attempts:
        after: tuple[str, int] = ("", -1)
        while True:
            behind = or_(e.stream > after[0], and_(e.stream == after[0], e.offset > after[1]))
            query = select(t.events).where(e.attempt == attempt, e.phase.in_(PHASES), behind)
            rows = conn.execute(query.order_by(e.stream, e.offset).limit(2000)).mappings().all()
            if not rows:
                break
            after = (rows[-1]["stream"], rows[-1]["offset"])
            count += len(rows)
            for stream in dict.fromkeys(row["stream"] for row in rows):
                project(
                    conn, attempt, stream, [_line(dict(row)) for row in rows if row["stream"] == stream], job_id=job_id
                )
    return count


def _line(row: Mapping[str, Any]) -> Line:
    names = ("phase", "event", "ts", "seq", "iteration", "epoch")
    event = Event(**{name: row[name] for name in names}, data=row["data"] or {}, extra=row["extra"] or {})
    return Line(offset=row["offset"], length=row["length"], event=event)
