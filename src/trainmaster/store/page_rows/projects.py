"""What belongs to each project: counts of jobs and tokens, granted targets."""

from __future__ import annotations

from sqlalchemy import Connection, func, select

from trainmaster.store import tables as t


def count_jobs(conn: Connection, *, project: str | None = None) -> dict[str, tuple[int, int]]:
    """By project: its jobs, and those of them that are not final."""
    j = t.jobs.c
    query = select(j.project, func.count()).group_by(j.project)
    query = query.where(j.project == project) if project is not None else query
    # Two queries: each walks an index, where one over both columns would read every row with its spec.
    going = {row[0]: int(row[1]) for row in conn.execute(query.where(j.stage.is_not(None)))}
    return {name: (jobs, going.get(name, 0)) for name, jobs in conn.execute(query)}


def count_tokens(conn: Connection, *, project: str | None = None) -> dict[str, int]:
    """By project: tokens that are not revoked."""
    c = t.tokens.c
    query = select(c.project, func.count()).where(c.project.is_not(None), c.revoked_at.is_(None)).group_by(c.project)
    query = query.where(c.project == project) if project is not None else query
    return {name: tokens for name, tokens in conn.execute(query)}  # noqa: C416 (rows are not pairs to mypy)


def list_granted(conn: Connection, *, project: str | None = None) -> dict[str, tuple[str, ...]]:
    """By project: targets that it may use."""
    g = t.target_grants.c
    query = select(g.project, g.target).order_by(g.target)
    query = query.where(g.project == project) if project is not None else query
    granted: dict[str, tuple[str, ...]] = {}
    for name, target in conn.execute(query):
        granted[name] = (*granted.get(name, ()), target)
    return granted
