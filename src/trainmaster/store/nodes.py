"""Rented instances, and the newest check results of each node."""

from __future__ import annotations

from collections import Counter
from datetime import datetime

from sqlalchemy import func, select

from trainmaster.api.iterations import CheckRecord
from trainmaster.api.nodes import Instance, Node
from trainmaster.core.results import Verdict
from trainmaster.store import tables as t
from trainmaster.store.database import Database

_WORST = (Verdict.FAIL, Verdict.ERROR, Verdict.WARN, Verdict.PASS, Verdict.SKIP)


def list_instances(
    db: Database,
    *,
    job_id: str | None = None,
    state: str | None = None,
    project: str | None = None,
    limit: int = 50,
    offset: int = 0,
) -> list[Instance]:
    """Rented machines, newest first: of a job, in a state, of a project, or all."""
    query = select(t.instances).order_by(t.instances.c.id.desc()).limit(limit).offset(offset)
    if state is not None:
        query = query.where(t.instances.c.state == state)
    if job_id is not None or project is not None:
        query = query.join(t.attempts, t.attempts.c.id == t.instances.c.attempt)
        query = query.join(t.jobs, t.jobs.c.id == t.attempts.c.job_id)
        wanted = [t.jobs.c.id == job_id] if job_id is not None else []
        wanted += [t.jobs.c.project == project] if project is not None else []
        query = query.where(*wanted)
    with db.read() as conn:
        return [Instance(**row) for row in conn.execute(query).mappings()]


def list_checks(db: Database, job_id: str) -> list[CheckRecord]:
    """The checks of all attempts of a job, in the order of the attempts."""
    query = (
        select(t.check_results)
        .join(t.attempts, t.attempts.c.id == t.check_results.c.attempt)
        .where(t.attempts.c.job_id == job_id)
        .order_by(t.attempts.c.number, t.check_results.c.node, t.check_results.c.id)
    )
    with db.read() as conn:
        return [CheckRecord(**row) for row in conn.execute(query).mappings()]


def list_nodes(db: Database, *, project: str | None = None, limit: int = 50, offset: int = 0) -> list[Node]:
    """Every node that was ever checked, by name, with what its newest checks said."""
    c, j = t.check_results.c, t.jobs.c
    joined = t.check_results.join(t.attempts, t.attempts.c.id == c.attempt).join(t.jobs, j.id == t.attempts.c.job_id)
    # The row that was written last names the attempt that looked last.
    newest = select(c.node, func.max(c.id).label("id")).select_from(joined).group_by(c.node)
    newest = newest.where(j.project == project) if project is not None else newest
    newest_page = newest.order_by(c.node).limit(limit).offset(offset).subquery()
    last = t.check_results.alias("last")
    where = last.join(newest_page, last.c.id == newest_page.c.id)
    rows = where.join(t.check_results, (c.attempt == last.c.attempt) & (c.node == last.c.node))
    rows = rows.join(t.attempts, t.attempts.c.id == c.attempt).join(t.jobs, j.id == t.attempts.c.job_id)
    query = select(c.node, c.attempt, j.id, j.project, c.verdict, c.at).select_from(rows).order_by(c.node, c.id)
    with db.read() as conn:
        records = conn.execute(query).all()
    nodes: dict[str, list[tuple[str, str, str, str, datetime | None]]] = {}
    for node, *rest in records:
        nodes.setdefault(node, []).append(tuple(rest))
    return [_node(name, checks) for name, checks in nodes.items()]


def _node(name: str, checks: list[tuple[str, str, str, str, datetime | None]]) -> Node:
    attempt, job_id, project = checks[0][:3]
    counts = Counter(verdict for _, _, _, verdict, _ in checks)
    worst = next((word for word in _WORST if counts[word.value]), Verdict.ERROR)
    at = max((when for *_, when in checks if when is not None), default=None)
    return Node(
        node=name,
        attempt=attempt,
        job_id=job_id,
        project=project,
        at=at,
        verdict=worst,
        checks=dict(sorted(counts.items())),
    )
