"""People who signed in by OpenID Connect, and their sessions. A row holds the SHA-256 of what is in the cookie."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, and_, delete, insert, not_, or_, select, update

from trainmaster.core.roles import Role
from trainmaster.store import tables as t
from trainmaster.store.database import Database

Grants = Sequence[tuple[Role, str | None]]
SHAPE = re.compile(r"tm_session_[A-Za-z0-9_-]{43}")
_PEOPLE, _SESSIONS = t.people.c, t.sessions.c
_KEPT = timedelta(days=1)  # after its end; then the row is removed by the next sign-in


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A signed-in person. `grants` are the roles and projects to choose from; `role` and `project` the chosen one."""

    id: int
    person: int
    name: str
    issuer: str
    role: Role
    project: str | None
    grants: tuple[tuple[Role, str | None], ...]
    created_at: datetime
    expires_at: datetime


def sign_in(
    conn: Connection, *, issuer: str, subject: str, name: str, grants: Grants, at: datetime, expires_at: datetime
) -> tuple[str, str]:
    """Begin a session with the first of the grants: the secret of its cookie, and the name of the person.

    Other sessions of the same person with a role that is no longer granted end. A name stays with the person who had it
    first: the audit trail speaks of people by it.
    """
    conn.execute(delete(t.sessions).where(_SESSIONS.expires_at < at - _KEPT))
    values = {"grants": [[role.value, project] for role, project in grants], "signed_in_at": at}
    mine = and_(_PEOPLE.issuer == issuer, _PEOPLE.subject == subject)
    row = conn.execute(select(_PEOPLE.id, _PEOPLE.name).where(mine)).first()
    if row is None:
        if len(name) > 63 or conn.execute(select(_PEOPLE.id).where(_PEOPLE.name == name)).first() is not None:
            name = f"{name[:54]}#{digest(f'{issuer} {subject}')[:8]}"
        made = insert(t.people).values(issuer=issuer, subject=subject, name=name, **values)
        person = conn.execute(made.returning(_PEOPLE.id)).scalar_one()
    else:
        person, name = row
        conn.execute(update(t.people).where(_PEOPLE.id == person).values(**values))
        granted = [and_(_SESSIONS.role == role.value, _SESSIONS.project.is_not_distinct_from(p)) for role, p in grants]
        conn.execute(delete(t.sessions).where(_SESSIONS.person == person, not_(or_(*granted))))
    secret = f"tm_session_{secrets.token_urlsafe(32)}"
    role, project = grants[0]
    session = {"hash": digest(secret), "person": person, "role": role.value, "project": project}
    conn.execute(insert(t.sessions).values(**session, created_at=at, expires_at=expires_at))
    return secret, name


def end_all(conn: Connection, *, issuer: str, subject: str) -> None:
    """End every session of a person, who has no role any more; tokens of their own end with that."""
    mine = and_(_PEOPLE.issuer == issuer, _PEOPLE.subject == subject)
    conn.execute(delete(t.sessions).where(_SESSIONS.person.in_(select(_PEOPLE.id).where(mine))))
    conn.execute(update(t.people).where(mine).values(grants=[]))


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


def find_session(db: Database, secret: str, *, issuer: str, at: datetime) -> Session | None:
    """The session of a cookie; None if it is unknown, over, or of another provider."""
    if not SHAPE.fullmatch(secret):
        return None
    query = _live(at).where(_SESSIONS.hash == digest(secret), _PEOPLE.issuer == issuer)
    row = db.first(query)
    return _session(row) if row is not None else None


def is_live(db: Database, session_id: int, *, at: datetime) -> bool:
    """Whether a session that was let in still runs."""
    return db.first(_live(at).where(_SESSIONS.id == session_id)) is not None


def list_sessions(db: Database, *, at: datetime, limit: int) -> list[Session]:
    """Sessions that run, newest first."""
    return [_session(row) for row in db.mappings(_live(at).limit(limit))]


def end(conn: Connection, session_id: int) -> str | None:
    """End a session; the name of its person, None where there is no such session."""
    query = select(_PEOPLE.name).join(t.sessions, _SESSIONS.person == _PEOPLE.id).where(_SESSIONS.id == session_id)
    name: str | None = conn.execute(query).scalar()
    conn.execute(delete(t.sessions).where(_SESSIONS.id == session_id))
    return name


def choose(conn: Connection, session_id: int, *, role: Role, project: str | None) -> None:
    """Continue a session with another of the grants of its person."""
    conn.execute(update(t.sessions).where(_SESSIONS.id == session_id).values(role=role.value, project=project))


def _live(at: datetime) -> Select[Any]:
    columns = [column for column in _SESSIONS if column.name != "hash"]
    joined = select(*columns, _PEOPLE.name, _PEOPLE.issuer, _PEOPLE.grants)
    ordered = joined.join(t.people, _SESSIONS.person == _PEOPLE.id).order_by(_SESSIONS.id.desc())
    return ordered.where(_SESSIONS.expires_at > at)


def _session(row: RowMapping) -> Session:
    grants = tuple((Role(role), project) for role, project in row["grants"])
    return Session(**{**row, "role": Role(row["role"]), "grants": grants})
