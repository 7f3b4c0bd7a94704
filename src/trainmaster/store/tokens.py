"""API tokens. A row holds the SHA-256 of 256 random bits; the token is shown once."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from datetime import UTC, datetime, timedelta

from sqlalchemy import Connection, RowMapping, insert, select, update

from trainmaster.api.access import Token
from trainmaster.core.errors import UsageError
from trainmaster.core.roles import RANK, Role
from trainmaster.store import tables as t
from trainmaster.store.database import Database

_TOKENS = t.tokens.c
PERSONAL = timedelta(days=30)  # since the last sign-in of its person a token of their own is good
_OWNED = (
    select(t.tokens, t.people.c.grants, t.people.c.signed_in_at)
    .outerjoin(t.token_owners, t.token_owners.c.token == _TOKENS.id)
    .outerjoin(t.people, t.people.c.id == t.token_owners.c.person)
)
SHAPE = re.compile(r"tm_[A-Za-z0-9_-]{43}")
FROM_FILE = "file-"  # begins the name of a token that a file of the deployment holds
RESERVED = frozenset({"loopback", "local", "control"})  # names in the audit trail of callers without a token


def issue(
    conn: Connection, *, name: str, role: Role, project: str | None, at: datetime, person: int | None = None
) -> str | None:
    """A new token, to be shown once; None where the name is taken (also by a revoked one: the audit trail names it).

    With `person` it is theirs, and lives only while they sign in.
    """
    reserved = name in RESERVED or name.startswith(FROM_FILE)
    if reserved or conn.execute(select(_TOKENS.id).where(_TOKENS.name == name)).first() is not None:
        return None
    token = f"tm_{secrets.token_urlsafe(32)}"
    row = {"name": name, "hash": digest(token), "role": role.value, "project": project, "created_at": at}
    made = conn.execute(insert(t.tokens).values(row).returning(_TOKENS.id)).scalar_one()
    if person is not None:
        conn.execute(insert(t.token_owners).values(token=made, person=person))
    return token


def admit(conn: Connection, token: str, *, at: datetime) -> str | None:
    """Let in whoever has this token as an admin of everything; its name, or None where it is known already.

    For a token that a secret of the deployment holds. The one that the secret held before is revoked; one that
    somebody revoked stays so.
    """
    assert SHAPE.fullmatch(token), "not a token"
    hashed = digest(token)
    if conn.execute(select(_TOKENS.id).where(_TOKENS.hash == hashed)).first() is not None:
        return None
    name = f"{FROM_FILE}{hashed[:8]}"
    before = _TOKENS.name.startswith(FROM_FILE, autoescape=True) & _TOKENS.revoked_at.is_(None)
    conn.execute(update(t.tokens).where(before).values(revoked_at=at))
    row = {"name": name, "hash": hashed, "role": Role.ADMIN.value, "project": None, "created_at": at}
    conn.execute(insert(t.tokens).values(row))
    return name


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def find_token(db: Database, token: str) -> Token | None:
    """The row of a token; None if it is unknown or revoked."""
    if not SHAPE.fullmatch(token):
        return None
    wanted = digest(token)
    row = db.first(_OWNED.where(_TOKENS.hash == wanted))
    # The index has compared hashes, which tells nothing of a token; the last word is in constant time all the same.
    if row is None or not hmac.compare_digest(row["hash"], wanted) or not _is_good(row):
        return None
    return _row(row)


def is_live(db: Database, token_id: int) -> bool:
    """Whether a token that was let in is still good."""
    row = db.first(_OWNED.where(_TOKENS.id == token_id))
    return row is not None and _is_good(row)


def refuse_absent(conn: Connection, name: str | None, project: str) -> None:
    """UsageError where whoever submitted something that begins only now could not submit it any more."""
    if name is None:  # the command line on the home folder, or this machine
        return
    row = conn.execute(_OWNED.where(_TOKENS.name == name)).mappings().first()
    if row is not None:
        if not _is_good(row):
            raise UsageError(
                f"the token {name} is revoked or has ended, and nothing begins for it; submit the set again"
            )
        return
    person = conn.execute(select(t.people).where(t.people.c.name == name)).mappings().first()
    may = person is not None and any(
        RANK[Role(role)] >= RANK[Role.USER] and where in (None, project) for role, where in person["grants"]
    )
    if person is None or not may or datetime.now(UTC) - person["signed_in_at"] >= PERSONAL:
        raise UsageError(
            f"{name} has not signed in for {PERSONAL.days} days or may not submit any more; submit the set again"
        )


def _is_good(row: RowMapping) -> bool:
    """Not revoked; and where a person made it, they signed in lately and may still do what it may."""
    if row["revoked_at"] is not None or row["signed_in_at"] is None:
        return row["revoked_at"] is None
    rank, project = RANK[Role(row["role"])], row["project"]
    covered = any(RANK[Role(role)] >= rank and where in (None, project) for role, where in row["grants"])
    return covered and datetime.now(UTC) - row["signed_in_at"] < PERSONAL


def any_live(db: Database) -> bool:
    """Whether anybody could be let in with a token."""
    return db.first(select(_TOKENS.id).where(_TOKENS.revoked_at.is_(None)).limit(1)) is not None


def list_owned(db: Database, person: int) -> list[Token]:
    """Tokens that a person made, by name; without revoked ones."""
    query = select(t.tokens).join(t.token_owners, t.token_owners.c.token == _TOKENS.id).order_by(_TOKENS.name)
    rows = db.mappings(query.where(t.token_owners.c.person == person, _TOKENS.revoked_at.is_(None)))
    return [_row(row) for row in rows]


def list_tokens(db: Database, *, project: str | None = None, limit: int | None = None, offset: int = 0) -> list[Token]:
    """Tokens by name: all, or those of one project."""
    query = select(t.tokens).order_by(_TOKENS.name).limit(limit).offset(offset)
    if project is not None:
        query = query.where(_TOKENS.project == project)
    return [_row(row) for row in db.mappings(query)]


def find_by_name(db: Database, name: str) -> Token | None:
    row = db.first(select(t.tokens).where(_TOKENS.name == name))
    return _row(row) if row is not None else None


def revoke(conn: Connection, name: str, *, at: datetime) -> bool:
    """Make a token useless from now on; False where there is no such token. A second time changes nothing."""
    mine = update(t.tokens).where(_TOKENS.name == name)
    conn.execute(mine.where(_TOKENS.revoked_at.is_(None)).values(revoked_at=at))
    return conn.execute(select(_TOKENS.id).where(_TOKENS.name == name)).first() is not None


def touch(conn: Connection, token_id: int, *, at: datetime) -> None:
    """Note when a token was last used."""
    conn.execute(update(t.tokens).where(_TOKENS.id == token_id).values(used_at=at))


def _row(row: RowMapping) -> Token:
    kept = {name: row[name] for name in row if name not in ("hash", "grants", "signed_in_at")}
    return Token(**{**kept, "role": Role(row["role"])})
