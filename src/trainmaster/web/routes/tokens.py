"""Access: tokens, the caller, and the audit trail."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import Path, Query
from pydantic import Field
from starlette.responses import Response

from trainmaster.api.access import Audit, Me, NewToken, Tokens
from trainmaster.core.roles import Role
from trainmaster.store import audit, tokens
from trainmaster.store.database import Database
from trainmaster.web import dependencies
from trainmaster.web.errors import Refused
from trainmaster.web.routes import Body, group, reply

router = group("access", prefix="/v1")


class TokenWish(Body):
    """A token to create."""

    name: dependencies.Name = Field(description="name in the audit trail; never reused")
    role: Role
    project: dependencies.Name | None = Field(default=None, description="limit to this project; null: all projects")


@router.get("/me", response_model=Me)
def find_me(who: dependencies.Viewer) -> Response:
    """The identity of the caller."""
    return reply(Me(name=who.name, role=who.role, project=who.project))


@router.get("/tokens", response_model=Tokens)
def list_tokens(
    db: dependencies.Db, who: dependencies.Admin, limit: dependencies.Limit = 200, offset: dependencies.Offset = 0
) -> Response:
    """Tokens by name, revoked ones too. Their secrets are not stored."""
    rows = tokens.list_tokens(db, project=who.project, limit=limit, offset=offset)
    return reply(Tokens(tokens=tuple(rows)))


@router.post("/tokens", response_model=NewToken, status_code=201)
def create_token(wish: TokenWish, db: dependencies.Db, who: dependencies.Admin) -> Response:
    """Create a token. Its secret is only in this answer. 409 if the name was used before."""
    dependencies.need_all_of(who, wish.project)
    token = issue(db, wish, by=who.name)
    return reply(NewToken(name=wish.name, role=wish.role, project=wish.project, token=token), status_code=201)


@router.delete("/tokens/{name}", status_code=204, response_class=Response)
def revoke_token(
    name: Annotated[str, Path(pattern=dependencies.NAME)], db: dependencies.Db, who: dependencies.Admin
) -> Response:
    """Revoke a token. A second time changes nothing."""
    token = tokens.find_by_name(db, name)
    if token is None or (who.project is not None and token.project != who.project):
        raise Refused(404, "not_found", f"no token {name}")
    if token.revoked_at is None:
        revoke(db, name, by=who.name)
    return Response(status_code=204)


def issue(db: Database, wish: TokenWish, *, by: str, person: int | None = None) -> str:
    """A new token, and its entry in the audit trail; Refused where the name was used before."""
    with db.write() as conn:
        token = tokens.issue(
            conn, name=wish.name, role=wish.role, project=wish.project, at=datetime.now(UTC), person=person
        )
        if token is not None:
            detail = {"role": wish.role.value, "project": wish.project}
            audit.record(conn, who=by, action="token.create", subject=f"token:{wish.name}", detail=detail)
    if token is None:
        raise Refused(409, "name_taken", f"the name {wish.name} was used by another token; choose a new one")
    return token


def revoke(db: Database, name: str, *, by: str) -> None:
    """Revoke a token, and enter it in the audit trail."""
    with db.write() as conn:
        tokens.revoke(conn, name, at=datetime.now(UTC))
        audit.record(conn, who=by, action="token.revoke", subject=f"token:{name}")


@router.get("/audit", response_model=Audit, dependencies=[dependencies.admins, dependencies.everywhere])
def list_audit(
    db: dependencies.Db,
    subject: Annotated[
        str | None,
        Query(pattern=r"^[^\x00]{1,256}$", description="entries of this subject, such as job:<id> or token:<name>"),
    ] = None,
    limit: dependencies.Limit = 50,
    offset: dependencies.Offset = 0,
) -> Response:
    """Audit trail, newest first."""
    rows = audit.list_audit(db, subject=subject, limit=limit, offset=offset)
    return reply(Audit(entries=tuple(rows), limit=limit, offset=offset))
