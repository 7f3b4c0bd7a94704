"""Search of rows by a word: failures of jobs, nodes by name, findings of checks that name a GPU."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, Text, cast, func, literal, select

from trainmaster.core.states import Reason
from trainmaster.store import tables as t
from trainmaster.store.columns import slices
from trainmaster.store.database import Database

_NEWEST = 500_000  # results of checks, of which a tenth is searched: their findings have no index, and a person waits


class FoundJob(NamedTuple):
    """A job, with the text in which the word stands."""

    job_id: str
    name: str
    project: str
    status: str
    text: str
    at: datetime


class FoundNode(NamedTuple):
    """A node and the job that checked it last, with the findings in which the word stands."""

    node: str
    job_id: str
    project: str
    at: datetime | None
    findings: Any


def find_failures(db: Database, word: str, *, project: str | None, limit: int) -> list[FoundJob]:
    """Jobs whose own message, or that of an attempt, has the word, or whose reason it is; newest first."""
    j, a = t.jobs.c, t.attempts.c
    columns = (j.id, j.name, j.project, j.status)
    # Two walks: joined, every attempt of every job would be looked up for the few that have a message.
    own = select(*columns, j.message, j.created_at).where(j.message != "", _has(db, j.message, word))
    tried = select(*columns, a.message, j.created_at).select_from(t.attempts.join(t.jobs, j.id == a.job_id))
    tried = tried.where(a.message != "", _has(db, a.message, word))
    queries = [tried, own]
    code = "_".join(word.lower().split())
    if code in {each.value for each in Reason}:  # as `jobs` prints it; the message may not have it
        said = literal(f"{code}: ")
        queries.append(select(*columns, said + j.message, j.created_at).where(j.reason == code))
    found: dict[str, FoundJob] = {}
    with db.read() as conn:
        for query in queries:
            newest = _of(query, project).order_by(j.created_at.desc(), j.id.desc()).limit(limit)
            for row in conn.execute(newest):
                found.setdefault(row[0], FoundJob(*row))
    return sorted(found.values(), key=lambda job: (job.at, job.job_id), reverse=True)[:limit]


def find_nodes(db: Database, word: str, *, project: str | None, limit: int) -> list[FoundNode]:
    """Nodes whose name has the word, each with its newest check."""
    c = t.check_results.c
    found: list[FoundNode] = []
    for some in slices(db.scalars(select(_NAMES.c.node).where(_has(db, _NAMES.c.node, word)))):
        newest = select(func.max(c.id)).where(c.node.in_(some))
        newest = newest if project is None else _of(newest.select_from(_checked()), project)
        ids = newest.group_by(c.node).order_by(c.node).limit(limit - len(found))
        found += _read_nodes(db, _select_nodes().where(c.id.in_(ids.scalar_subquery())).order_by(c.node))
        if len(found) >= limit:
            break
    return found


def find_devices(
    db: Database, word: str, *, project: str | None, limit: int, only_bad: bool = False
) -> list[FoundNode]:
    """The newest results of checks in whose findings the word stands: a serial number, a UUID, a bus address, a fault.

    Those of the check that states who each GPU is, and those that did not pass; `only_bad`: these alone.
    """
    c = t.check_results.c
    last = db.scalar(select(func.max(c.id))) or 0
    near = _select_nodes().where(t.TELLING, c.id > last - _NEWEST, _has(db, cast(c.findings, Text), word))
    near = near.where(c.verdict.not_in(("pass", "skip"))) if only_bad else near
    return _read_nodes(db, _of(near, project).order_by(c.id.desc()).limit(limit))


def _has(db: Database, column: ColumnElement[Any], word: str) -> ColumnElement[bool]:
    """Whether a text has the word, in capitals or not."""
    if db.engine.dialect.name == "sqlite":
        return column.contains(word, autoescape=True)  # its LIKE ignores case; `lower` would copy every text
    return column.icontains(word, autoescape=True)


def _names() -> Any:
    """Every name of a node: one step down the index for each, where DISTINCT would walk all checks of it."""
    checks, more = t.check_results.c, t.check_results.alias("more").c
    names = select(func.min(checks.node).label("node")).cte("names", recursive=True)
    following = select(func.min(more.node)).where(more.node > names.c.node).scalar_subquery()
    return names.union_all(select(following).where(names.c.node.is_not(None)))


_NAMES = _names()


def _select_nodes() -> Select[Any]:
    c, j = t.check_results.c, t.jobs.c
    return select(c.node, j.id, j.project, c.at, c.findings).select_from(_checked())


def _checked() -> Any:
    c = t.check_results.c
    joined = t.check_results.join(t.attempts, t.attempts.c.id == c.attempt)
    return joined.join(t.jobs, t.jobs.c.id == t.attempts.c.job_id)


def _of(query: Select[Any], project: str | None) -> Select[Any]:
    return query if project is None else query.where(t.jobs.c.project == project)


def _read_nodes(db: Database, query: Select[Any]) -> list[FoundNode]:
    return [FoundNode(*row) for row in db.rows(query)]
