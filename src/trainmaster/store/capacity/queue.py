"""The queue of a place, read from the rows: who waits, who runs on which devices, and what stopping each would cost."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, Text, bindparam, func, or_, select, type_coerce, update

from trainmaster.core.config.queue import PRIORITIES, Queue
from trainmaster.core.errors import JobUnreadable
from trainmaster.core.plan import EVENTS_FILE
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import Reason, Stage, TargetState
from trainmaster.queueing.state import Kind, Need, Running, Waiting
from trainmaster.store import jobs, leases
from trainmaster.store import tables as t
from trainmaster.store.capacity import after, eta
from trainmaster.store.capacity.devices import DeviceRow
from trainmaster.store.columns import fetch_at_once, slices
from trainmaster.store.database import Database
from trainmaster.store.rows import JobRow, read_each

_J, _A = t.jobs.c, t.attempts.c
_PENDING = tuple(stage.value for stage in (Stage.PLACING, Stage.PROVISIONING, Stage.CHECKING))
_QUEUED = (_J.stage.is_not(None), _J.stage == Stage.QUEUED.value, _J.cancel_requested.is_(False))
_SINCE = func.coalesce(_J.stage_since, _J.created_at)
_ENDLESS_S = 1e10  # three centuries
_FEW = 500  # ids that a query names; more are looked for among all
HIDES_GPUS = "CUDA_VISIBLE_DEVICES"  # empty in `env`: the job uses no GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the spec of a job says to the queue."""

    target: str  # as the spec writes it; the row has what that stands for, which is not for everybody
    nodes: int  # with the spares
    spares: int
    each: int
    uses_gpu: bool  # unless it hides them from itself
    priority: int
    preemptible: bool
    longest_s: float | None
    max_wait_s: float | None
    price_per_hour: float | None = None  # dollars, as stated

    def need(self, kinds: Collection[str]) -> Need | None:
        """Devices for the job at a place that gives out these kinds; None: none of them, it starts at once."""
        kind: Kind = "gpu" if self.uses_gpu and "gpu" in kinds else "slot"
        return Need(nodes=self.nodes, each=self.each, kind=kind) if kind in kinds else None


@functools.lru_cache(maxsize=20_000)  # a thousand waiting jobs are read at every pass
def read_request(text: str) -> Request:
    """The request in the JSON of a spec. Fields that an older row lacks have their defaults; TypeError on others."""
    spec = json.loads(text)
    resources, queue = spec.get("resources") or {}, spec.get("queue") or {}
    env = spec.get("env") or {}
    request = Request(
        target=spec.get("target", "local"),
        nodes=resources.get("nodes", 1) + resources.get("spares", 0),
        spares=resources.get("spares", 0),
        each=resources.get("processes_per_node", 1),
        uses_gpu=env.get(HIDES_GPUS) != "",
        priority=read_priority(queue.get("priority", "normal")),
        preemptible=bool(queue.get("preemptible")),
        longest_s=(spec.get("limits") or {}).get("timeout_s"),
        max_wait_s=queue.get("max_wait_s"),
        price_per_hour=resources.get("price_per_hour"),
    )
    counts = (request.nodes, request.spares, request.each)
    others = (request.longest_s, request.max_wait_s, request.price_per_hour)
    # As a float: a whole number of 400 digits would end the decisions for the whole place.
    if not all(type(count) is int for count in counts) or not all(s is None or _is_number(s) for s in others):
        raise TypeError("a number of the spec is none")
    return request


def _is_number(value: object) -> bool:
    """Whether it is a finite number; OverflowError where it is too large for one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def find_request(spec: JobSpec) -> Request:
    """The request of a spec that was read already."""
    return Request(
        target=spec.target, nodes=spec.resources.machines, spares=spec.resources.spares,
        each=spec.resources.processes_per_node, uses_gpu=spec.env.get(HIDES_GPUS) != "",
        priority=read_priority(spec.queue.priority), preemptible=spec.queue.preemptible,
        longest_s=spec.limits.timeout_s, max_wait_s=spec.queue.max_wait_s,
        price_per_hour=spec.resources.price_per_hour,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRow:
    """A queued job."""

    id: str
    name: str
    project: str
    target: str
    request: Request
    since: datetime
    message: str
    lease_token: str | None
    attempts: int = 0  # that it had before
    machines: tuple[str, ...] = ()  # of its last attempt


def list_waiting(
    db: Database, *, host: str | None = None, words: Collection[str] | None = None, driven: bool = True
) -> list[WaitingRow]:
    """Queued jobs that may start now, oldest first: of these targets, and where `host` is given driven from there.

    Jobs that nobody drives are left out (`driven`): they would keep others waiting for a start that never comes.
    """
    before = (_A.job_id == _J.id) & (_A.number == _J.attempts)
    query = select(*_OF_WAITING, _J.attempts, _J.lease_owner, _A.handle).outerjoin(t.attempts, before)
    query = query.where(*_QUEUED, ~after.named())
    query = query.where(_J.target.in_(list(words))) if words is not None else query
    with db.read() as conn:
        if driven:
            query = query.where(leases.rested(), _J.lease_until >= leases.clock(conn))
        rows = conn.execute(query.order_by(_SINCE, _J.id)).all()
    here = [row for row in rows if host is None or (row.lease_owner or "").partition(" ")[0] == host]
    return read_each(_waiting_again, here)


def count_waiting() -> Select[Any]:
    """The query for how many jobs wait in a queue, without those that wait for other jobs to end, and since when the
    first of them does."""
    return select(func.count(), func.min(_SINCE)).select_from(t.jobs).where(*_QUEUED, ~after.named())


def find_unreadable(db: Database, ids: Collection[str]) -> set[str]:
    """Those of these jobs whose rows cannot be read. It parses whole specs: not for all jobs that wait."""
    query = select(*jobs.COLUMNS).where(_J.id.in_(bindparam("ids", expanding=True)))
    found = set[str]()
    with db.read() as conn:
        for some in slices(ids):
            rows = conn.execute(query, {"ids": some}).mappings().all()
            found |= {row["id"] for row in rows} - {job.id for job in read_each(jobs.read_job, rows)}
    return found


def read_stamp(db: Database, words: Collection[str]) -> tuple[Any, ...]:
    """Something that changes whenever `list_waiting` of these targets does.

    A changed priority is a change of the spec alone, and these are not read here: its line of the audit trail tells.
    """
    with db.read() as conn:
        waiting = (
            *_QUEUED, ~after.named(), leases.rested(),
            _J.target.in_(list(words)), _J.lease_until >= leases.clock(conn),
        )  # fmt: skip
        audited = select(func.max(t.audit.c.id)).scalar_subquery()
        query = select(func.count(), func.count(_J.lease_token.distinct()), func.max(_SINCE), func.min(_SINCE), audited)
        return tuple(conn.execute(query.select_from(t.jobs).where(*waiting)).one())


@dataclass(frozen=True, slots=True)
class Queued:
    """A queued job, as little of it as a list of ten thousand needs."""

    id: str
    project: str
    target: str
    driven: bool


def list_ids(db: Database, *, project: str | None = None) -> set[str]:
    """Ids of queued jobs, of one project or of all."""
    # As one text: ten thousand rows take longer to come through the driver than the database needs to find them.
    wanted = (*_QUEUED, *([_J.project == project] if project is not None else []))
    text = db.scalar(select(func.aggregate_strings(_J.id, "\n")).where(*wanted))
    return set(text.split("\n")) if text else set()


def list_queued(db: Database, *, ids: Collection[str] | None = None) -> list[Queued]:
    """Queued jobs, oldest first: all, or some."""
    query = select(_J.id, _J.project, _J.target, _J.lease_token.is_not(None)).where(*_QUEUED)
    few = ids is not None and len(ids) <= _FEW
    query = query.where(_J.id.in_(list(ids))) if ids is not None and few else query
    found = [Queued(*row) for row in db.rows(query.order_by(_SINCE, _J.id))]
    return found if ids is None or few else [job for job in found if job.id in ids]


class _Columns(NamedTuple):
    """Columns of a job from which `_waiting` makes a row."""

    id: str
    name: str
    project: str
    target: str
    spec: Any
    stage_since: datetime | None
    created_at: datetime
    message: str
    lease_token: str | None


def list_rows(db: Database, ids: Sequence[str]) -> dict[str, WaitingRow]:
    """Some queued jobs."""
    with db.read() as conn:
        rows = fetch_at_once(conn, _THESE, {"ids": ids}) if ids else []
    return {row.id: row for row in read_each(_waiting, (_Columns(*row) for row in rows))}


_OF_WAITING = tuple(
    type_coerce(_J[name], Text).label(name) if name == "spec" else _J[name] for name in _Columns._fields
)
_THESE = select(*_OF_WAITING).where(_J.id.in_(bindparam("ids", expanding=True)))


def list_pending(
    db: Database, *, project: str | None = None, limit: int | None = None, offset: int = 0
) -> tuple[list[WaitingRow], int]:
    """Jobs that their target has and has not begun: a queue of its own, whose reason is the job's message; how many."""
    last = (_A.job_id == _J.id) & (_A.number == _J.attempts)
    pending = [
        _J.stage.is_not(None),
        _J.stage.in_(_PENDING),
        _A.ended_at.is_(None),
        or_(_J.stage != Stage.CHECKING.value, _A.report == TargetState.WAITING.value),
        *([_J.project == project] if project is not None else []),
    ]
    page = select(*_OF_WAITING).join(t.attempts, last).where(*pending).order_by(_J.created_at, _J.id)
    count = select(func.count()).select_from(t.jobs.join(t.attempts, last)).where(*pending)
    with db.read() as conn:
        total = int(conn.execute(count).scalar_one())
        wanted = total > offset and (limit is None or limit > 0)
        rows = conn.execute(page.limit(limit).offset(offset)).all() if wanted else []
        return read_each(_waiting, rows), total


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The job of an attempt."""

    job_id: str
    name: str
    project: str


def list_names(db: Database, held: Sequence[str]) -> dict[str, Holder]:
    """The jobs of attempts."""
    query = select(_A.id, _J.id, _J.name, _J.project).join(t.jobs, _J.id == _A.job_id).where(_A.id.in_({*held}))
    with db.read() as conn:
        rows = fetch_at_once(conn, query) if held else []
    return {row[0]: Holder(job_id=row[1], name=row[2], project=row[3]) for row in rows}


def set_reason(conn: Connection, job_id: str, reason: str) -> None:
    """Why a queued job waits, as its message."""
    queued = (_J.id == job_id) & (_J.stage == Stage.QUEUED.value) & _J.cancel_requested.is_(False)
    conn.execute(update(t.jobs).where(queued).values(message=reason))


def set_priority(conn: Connection, job_id: str, word: str) -> str | None:
    """The priority that a queued job had before; None where it is not queued or is to be cancelled: nothing changed.

    It is in the stored spec, where all who read the queue find it. The row is held: a reconciler that places the job
    meanwhile has either done so before, or waits for this change.
    """
    query = select(_J.spec, _J.stage, _J.cancel_requested).where(_J.id == job_id).with_for_update()
    row = conn.execute(query).first()
    if row is None or row.stage != Stage.QUEUED.value or row.cancel_requested:
        return None
    stated = row.spec.get("queue") or {}
    before: str = stated.get("priority", Queue().priority)
    if before != word:
        spec = {**row.spec, "queue": {**stated, "priority": word}}
        conn.execute(update(t.jobs).where(_J.id == job_id).values(spec=spec))
    return before


def list_words(db: Database) -> list[str]:
    """Targets of the jobs that wait."""
    query = select(_J.target).where(_J.stage.is_not(None), _J.stage == Stage.QUEUED.value).distinct()
    return db.scalars(query)


def list_used_words(db: Database) -> list[str]:
    """Targets of all jobs, ended ones too."""
    return db.scalars(select(_J.target).distinct())


def to_waiting(rows: Sequence[WaitingRow], kinds: Collection[str]) -> tuple[Waiting, ...]:
    """Those of the jobs that need devices, for the queue."""
    needs = ((row, row.request.need(kinds)) for row in rows)
    return tuple(
        Waiting(
            job=row.id, project=row.project, priority=row.request.priority, need=need,
            since_s=row.since.timestamp(), longest_s=_bound(row.request.longest_s), prefers=row.machines,
        )
        for row, need in needs if need is not None
    )  # fmt: skip


def list_holders(db: Database, devices: Sequence[DeviceRow], *, now: datetime) -> tuple[Running, ...]:
    """Jobs that hold these devices, with their expected end and what stopping them would cost."""
    held: dict[str, list[DeviceRow]] = {}
    for device in devices:
        if device.attempt is not None:
            held.setdefault(device.attempt, []).append(device)
    if not held:
        return ()
    columns = (_A.id, _A.stop_reason, _A.ended_at, *jobs.COLUMNS)
    query = select(*columns).join(t.jobs, _J.id == _A.job_id).where(_A.id.in_(list(held)))
    with db.read() as conn:
        rows = conn.execute(query).all()
        known = {row[0]: row[1:] for row in read_each(_holder, rows)}
        left = eta.list_left(db, [job for *_, job in known.values()], now=now)
        asks = [name for name, (_, _, job) in known.items() if job.spec.queue.preemptible]
        lost = _list_unsaved(db, asks)
    running = []
    for attempt, some in held.items():
        if attempt not in known:  # of a database that was restored, or unreadable: all we know is that they are held
            running.append(_unknown(attempt, some))
            continue
        stop, ended, job = known[attempt]
        unsaved, since_s = lost.get(attempt), (some[0].since or now).timestamp()
        end_s, latest = _expect_end(job, since_s, left.get(job.id), now)
        running.append(
            Running(
                job=job.id, project=job.project, priority=read_priority(job.spec.queue.priority), kind=some[0].kind,
                devices=_by_machine(some), since_s=since_s, end_s=end_s, end_latest=latest,
                preemptible=job.spec.queue.preemptible and job.stage is Stage.RUNNING,
                loss=None if unsaved is None else unsaved * len(some),
                stopping=stop is not None or ended is not None or job.cancel_requested,
            )
        )  # fmt: skip
    return tuple(running)


def _holder(row: Any) -> tuple[str, str | None, datetime | None, JobRow]:
    return *row[:3], jobs.read_job(dict(zip(jobs.NAMES, row[3:], strict=True)))


def _expect_end(job: JobRow, since_s: float, left_s: float | None, now: datetime) -> tuple[float | None, bool]:
    """When a job that holds devices ends, None: nothing says; and whether that is its limit: it may end before."""
    left_s, limit_s = _bound(left_s), _bound(job.spec.limits.timeout_s)
    ends = [] if left_s is None or job.stage is None else [(now.timestamp() + left_s, False)]
    ends += [] if limit_s is None or job.stage is None else [(since_s + limit_s, True)]
    return min(ends, default=(None, False))


def _bound(seconds: float | None) -> float | None:
    """None for a time whose end has no date: specs of earlier versions may state one."""
    return seconds if seconds is not None and seconds < _ENDLESS_S else None


def read_priority(word: str) -> int:
    """Number of a priority; another engine's word counts as normal."""
    return PRIORITIES.index(word if word in PRIORITIES else "normal")


def count_preempted(db: Database, job_id: str) -> int:
    """Attempts of a job that our queue stopped for another job."""
    wanted = (_A.job_id == job_id, _A.stop_reason == Reason.PREEMPTED.value, _A.reason == Reason.PREEMPTED.value)
    return int(db.scalar(select(func.count()).select_from(t.attempts).where(*wanted)))


def _list_unsaved(db: Database, attempts: Sequence[str]) -> dict[str, float]:
    """Steps of each attempt since its last durable save or its begin; none for one that reports no steps."""
    unsaved: dict[str, float] = {}
    for attempt in attempts:
        step = _last_step(db, attempt, "STEP", "metrics")
        if step is None:
            continue
        saved = _last_step(db, attempt, "CHECKPOINT", "saved")
        if saved is None:
            saved = _last_step(db, attempt, "CHECKPOINT", "loaded")
        unsaved[attempt] = max(0.0, step - (saved or 0.0))
    return unsaved


def _last_step(db: Database, attempt: str, phase: str, event: str) -> float | None:
    e = t.events.c
    query = (
        select(e.data)
        .where(e.attempt == attempt, e.stream == EVENTS_FILE, e.phase == phase, e.event == event)
        .order_by(e.offset.desc())
    )
    rows = db.scalars(query.limit(20))
    # A save in the memory of its node alone is not durable: the node's memory goes with the job.
    steps = [data.get("step") for data in rows if isinstance(data, Mapping) and data.get("tier") != "memory"]
    numbers = [float(step) for step in steps if isinstance(step, int) and not isinstance(step, bool)]
    return numbers[0] if numbers else None


def _by_machine(rows: Sequence[DeviceRow]) -> dict[str, tuple[str, ...]]:
    return {
        name: tuple(row.device for row in rows if row.machine == name)
        for name in dict.fromkeys(r.machine for r in rows)
    }


def _unknown(attempt: str, rows: Sequence[DeviceRow]) -> Running:
    job, held = attempt.rpartition(".")[0], _by_machine(rows)
    return Running(job=job, project="", priority=0, kind=rows[0].kind, devices=held, since_s=0.0)


def _waiting(row: Any, *, attempts: int = 0, machines: tuple[str, ...] = ()) -> WaitingRow:
    try:
        request = read_request(_text(row.spec))
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        raise JobUnreadable(row.id, row.project) from None  # the cause may repeat values of the spec
    if attempts:  # after a loss there may be no machine for a spare: it is not waited for
        request = replace(request, nodes=request.nodes - request.spares, spares=0)
    return WaitingRow(
        id=row.id, name=row.name, project=row.project, target=row.target, request=request,
        since=row.stage_since or row.created_at, message=row.message, lease_token=row.lease_token,
        attempts=attempts, machines=machines,
    )  # fmt: skip


def _waiting_again(row: Any) -> WaitingRow:
    # A handle that is none says nothing of the machines before: they are only preferred.
    held = row.handle.get("devices") if isinstance(row.handle, Mapping) else None
    return _waiting(row, attempts=row.attempts, machines=tuple(held) if isinstance(held, Mapping) else ())


def _text(spec: Any) -> str:
    return spec if isinstance(spec, str) else json.dumps(spec, sort_keys=True)
