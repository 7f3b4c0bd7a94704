"""Sets of runs: a row for the set, and one for each of its trials, all made in one transaction.

A trial becomes a job when its turn comes; `job_id` is its job since then. The job's own rows say how it goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import zip_longest
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, func, insert, select, update

from trainmaster.core.config.sweep import Sweep
from trainmaster.core.errors import KeyTaken
from trainmaster.core.schema import build, to_plain
from trainmaster.core.spec import JobSpec
from trainmaster.store import tables as t
from trainmaster.store.database import Database

_SETS, _TRIALS = t.job_sets.c, t.set_trials.c


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRow:
    """A set of runs."""

    id: str
    name: str
    project: str
    parallel: int  # trials that may be open at once
    message: str  # why its next trial does not begin
    created_at: datetime
    cancel_at: datetime | None
    submitted_by: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """One run of a set. `open`: its job is not final; None where it has none, or it was deleted."""

    number: int
    values: Mapping[str, Any]
    job_id: str | None
    open: bool | None
    word: str | None = None
    status: str | None = None  # of its job; None where it has none, or it was deleted


class Sent(NamedTuple):
    """A submission that may come again: digests of its idempotency key and of what it asks for."""

    key: str
    content: str


def insert_set(
    conn: Connection,
    set_id: str,
    sweep: Sweep,
    *,
    by: str | None,
    at: datetime,
    words: Sequence[str] = (),
    sent: Sent | None = None,
) -> None:
    """The set with all its trials; `words` are what their targets stand for."""
    conn.execute(
        insert(t.job_sets).values(
            id=set_id, name=sweep.name, project=sweep.project, parallel=sweep.parallel, message="", created_at=at,
            submitted_by=by, over=False, submit_key=sent and sent.key, submit_hash=sent and sent.content,
        )
    )  # fmt: skip
    rows = [
        {
            "set_id": set_id,
            "number": trial.number,
            "values": dict(trial.values),
            "spec": to_plain(trial.spec),
            "word": word,
        }
        for trial, word in zip_longest(sweep.trials, words)
    ]
    if rows:
        conn.execute(insert(t.set_trials), rows)


def find_sent(conn: Connection, project: str, sent: Sent) -> str | None:
    """The set that was made of this submission; KeyTaken where its key stands for another one."""
    query = select(_SETS.id, _SETS.submit_hash).where(_SETS.project == project, _SETS.submit_key == sent.key)
    row = conn.execute(query).first()
    if row is not None and row.submit_hash != sent.content:
        raise KeyTaken(f"this idempotency key stands for set {row.id}, which has another spec; take a new key")
    return str(row.id) if row is not None else None


_SET = select(*(t.job_sets.c[name] for name in SetRow.__dataclass_fields__))


def find_set(db: Database, word: str) -> SetRow | None:
    """The set with this id, or the newest of this name."""
    query = _SET.where((_SETS.id == word) | (_SETS.name == word)).order_by(_SETS.created_at.desc(), _SETS.id)
    row = db.first(query.limit(1))
    return SetRow(**row) if row is not None else None


def search_ids(db: Database, beginning: str, *, limit: int = 20) -> list[str]:
    """Ids of sets that begin so, newest first."""
    query = select(_SETS.id).where(_SETS.id.startswith(beginning, autoescape=True))
    return db.scalars(query.order_by(_SETS.created_at.desc(), _SETS.id).limit(limit))


def list_sets(
    db: Database, *, project: str | None = None, find: str | None = None, limit: int = 200, offset: int = 0
) -> list[SetRow]:
    """Sets, newest first. `find` is a name, or the beginning of an id."""
    query = _SET.order_by(_SETS.created_at.desc(), _SETS.id).limit(limit).offset(offset)
    if find is not None:
        query = query.where((_SETS.name == find) | _SETS.id.startswith(find, autoescape=True))
    if project is not None:
        query = query.where(_SETS.project == project)
    return [SetRow(**row) for row in db.mappings(query)]


def list_unfinished(db: Database) -> list[SetRow]:
    """Sets that have trials to begin, or jobs to cancel."""
    return [SetRow(**row) for row in db.mappings(_SET.where(_SETS.over.is_(False)))]


def list_trials(db: Database, set_id: str) -> list[TrialRow]:
    """Trials of a set, in order."""
    job = t.jobs.c
    query = (
        select(_TRIALS.number, _TRIALS["values"], _TRIALS.job_id, _TRIALS.word, job.status, job.stage)
        .select_from(t.set_trials.outerjoin(t.jobs, job.id == _TRIALS.job_id))
        .where(_TRIALS.set_id == set_id)
        .order_by(_TRIALS.number)
    )
    with db.read() as conn:
        return [
            TrialRow(
                number=number,
                values=values,
                job_id=job_id,
                word=word,
                open=None if status is None else stage is not None,
                status=status,
            )
            for number, values, job_id, word, status, stage in conn.execute(query).all()
        ]


class Outcome(NamedTuple):
    """A trial in a list of sets: its job, if it has one, and how that stands. `status` is None where it was deleted."""

    number: int
    job_id: str | None
    status: str | None


def list_outcomes(db: Database, set_ids: Sequence[str]) -> dict[str, list[Outcome]]:
    """By set: its trials, in order, without their values and specs."""
    job = t.jobs.c
    query = (
        select(_TRIALS.set_id, _TRIALS.number, _TRIALS.job_id, job.status)
        .select_from(t.set_trials.outerjoin(t.jobs, job.id == _TRIALS.job_id))
        .where(_TRIALS.set_id.in_(list(set_ids)))
        .order_by(_TRIALS.set_id, _TRIALS.number)
    )
    found: dict[str, list[Outcome]] = {set_id: [] for set_id in set_ids}
    with db.read() as conn:
        for set_id, *trial in conn.execute(query).all():
            found[set_id].append(Outcome(*trial))
    return found


def list_alone(db: Database, *, project: str | None, limit: int, offset: int) -> tuple[list[str], int]:
    """Ids of a page of jobs that are no trials, newest first, and how many there are."""
    alone = [~select(_TRIALS.number).where(_TRIALS.job_id == t.jobs.c.id).exists()]
    if project is not None:
        alone.append(t.jobs.c.project == project)
    page = select(t.jobs.c.id).where(*alone).order_by(t.jobs.c.created_at.desc(), t.jobs.c.id.desc())
    with db.read() as conn:
        ids = list(conn.execute(page.limit(limit).offset(offset)).scalars())
        return ids, int(conn.execute(select(func.count()).select_from(t.jobs).where(*alone)).scalar_one())


def find_word(conn: Connection, job_id: str) -> str:
    """What the target of a job stands for."""
    return str(conn.execute(select(t.jobs.c.target).where(t.jobs.c.id == job_id)).scalar_one())


def find_spec(db: Database, set_id: str, number: int) -> JobSpec:
    query = select(_TRIALS.spec).where(_TRIALS.set_id == set_id, _TRIALS.number == number)
    return build(JobSpec, db.scalar(query))


def take_trial(conn: Connection, set_id: str, number: int, job_id: str) -> bool:
    """The trial is this job from now on; False where it is one already, or the set was cancelled."""
    # A set that is being cancelled is waited for, and one that is not yet waits for this job.
    if is_cancelled(conn, set_id):
        return False
    mine = (_TRIALS.set_id == set_id, _TRIALS.number == number, _TRIALS.job_id.is_(None))
    return conn.execute(update(t.set_trials).where(*mine).values(job_id=job_id)).rowcount == 1


def is_cancelled(conn: Connection, set_id: str) -> bool:
    """Waits for a cancel that is being written; one that comes later waits for us."""
    return conn.execute(select(_SETS.cancel_at).where(_SETS.id == set_id).with_for_update()).scalar_one() is not None


def may_cancel(conn: Connection, set_id: str) -> bool:
    """Whether something is left to begin or to stop; it stays so until this transaction ends.

    The set is locked, and one of its open jobs: neither the last end of a trial nor the mark of the last pass comes
    between the answer and the cancel. One job, so that two who lock many in another order cannot wait for each other.
    """
    row = conn.execute(select(_SETS.cancel_at, _SETS.over).where(_SETS.id == set_id).with_for_update()).first()
    if row is None:
        return False
    mine, job = _TRIALS.set_id == set_id, t.jobs.c
    going = select(job.id).join(t.set_trials, _TRIALS.job_id == job.id).where(mine, job.stage.is_not(None))
    if conn.execute(going.limit(1).with_for_update(of=t.jobs)).first() is not None:
        return True
    if row.cancel_at is None and _has(conn, select(t.schedules.c.set_id).where(t.schedules.c.set_id == set_id)):
        return True  # its next time comes
    # A set is marked at the pass that begins its last trial, a search at the one that has recorded the last end.
    if row.over:
        return False
    searched = _has(conn, select(t.searches.c.set_id).where(t.searches.c.set_id == set_id))
    return searched or _has(conn, select(_TRIALS.number).where(mine, _TRIALS.job_id.is_(None)))


def _has(conn: Connection, query: Select[Any]) -> bool:
    return conn.execute(query.limit(1)).first() is not None


def request_cancel(conn: Connection, set_id: str, *, at: datetime) -> None:
    """No further trial begins. Repeated, it changes nothing."""
    conn.execute(
        update(t.job_sets).where(_SETS.id == set_id, _SETS.cancel_at.is_(None)).values(cancel_at=at, over=False)
    )


def set_message(conn: Connection, set_id: str, message: str) -> None:
    conn.execute(update(t.job_sets).where(_SETS.id == set_id, _SETS.message != message).values(message=message))


def mark_over(conn: Connection, set_id: str) -> None:
    """Nothing is left to begin or to cancel. Of a set with a schedule: until its next time."""
    if not is_cancelled(conn, set_id):  # and no time of a schedule adds trials while this row is locked
        waiting = select(_TRIALS.number).join(t.schedules, t.schedules.c.set_id == _TRIALS.set_id)
        waiting = waiting.where(_TRIALS.set_id == set_id, _TRIALS.job_id.is_(None))
        if _has(conn, waiting):
            return
    conn.execute(update(t.job_sets).where(_SETS.id == set_id).values(over=True, message=""))
