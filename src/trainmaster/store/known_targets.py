"""Targets by name, and the projects that may use each, as which account. A row holds no secret: files keep those."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, delete, func, insert, select

from trainmaster.store import tables as t
from trainmaster.store.columns import Sound

_TARGETS, _GRANTS = t.known_targets.c, t.target_grants.c


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTarget:
    """A name that specs may write, and what it stands for."""

    name: str
    word: str
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A project may use a target; its jobs run there as `user`."""

    target: str
    project: str
    user: str | None  # None: the account of the target's settings
    identity: Mapping[str, str] | None  # place → machine and user that answered there; None: never asked
    created_at: datetime


def insert_target(conn: Connection, name: str, word: str, *, at: datetime) -> bool:
    """Make a target known; False where the name is taken."""
    if find_target(conn, name) is not None:
        return False
    conn.execute(insert(t.known_targets).values(name=name, word=word, created_at=at))
    return True


def find_target(conn: Connection, name: str) -> KnownTarget | None:
    row = conn.execute(select(t.known_targets).where(_TARGETS.name == name)).mappings().first()
    return KnownTarget(**row) if row is not None else None


def list_targets(conn: Connection) -> list[KnownTarget]:
    """Every known target, by name."""
    return [KnownTarget(**row) for row in conn.execute(select(t.known_targets).order_by(_TARGETS.name)).mappings()]


def remove_target(conn: Connection, name: str) -> bool:
    """Forget a target and who may use it; False where there is none."""
    grants = conn.execute(delete(t.target_grants).where(_GRANTS.target == name)).rowcount
    return conn.execute(delete(t.known_targets).where(_TARGETS.name == name)).rowcount + grants > 0


def count_open_jobs(conn: Connection, target: str) -> int:
    """Open jobs whose spec writes this target."""
    named = Sound(t.jobs.c.spec)["target"].as_string() == target
    return conn.execute(select(func.count()).where(t.jobs.c.stage.is_not(None), named)).scalar_one()


def list_grants(conn: Connection, *, target: str | None = None) -> list[Grant]:
    """Who may use a target, or any, by target and project."""
    query = select(t.target_grants).order_by(_GRANTS.target, _GRANTS.project)
    query = query if target is None else query.where(_GRANTS.target == target)
    return [Grant(**row) for row in conn.execute(query).mappings()]


def put_grant(
    conn: Connection, target: str, project: str, *, user: str | None, identity: Mapping[str, str], at: datetime
) -> None:
    """Let a project use a target as this user, in place of an earlier one."""
    remove_grant(conn, target, project)
    row = {"target": target, "project": project, "user": user, "identity": dict(identity), "created_at": at}
    conn.execute(insert(t.target_grants).values(row))


def remove_grant(conn: Connection, target: str, project: str) -> bool:
    """Take a target away from a project; False where it had none."""
    mine = delete(t.target_grants).where(_GRANTS.target == target, _GRANTS.project == project)
    return conn.execute(mine).rowcount == 1
