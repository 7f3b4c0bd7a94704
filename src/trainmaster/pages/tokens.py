"""Tokens by name, revoked ones too, without their secrets."""

from __future__ import annotations

from trainmaster.api.access import Tokens
from trainmaster.store import tokens
from trainmaster.store.database import Database

Page = Tokens


def read(db: Database, *, project: str | None = None, limit: int | None = None, offset: int = 0) -> Tokens:
    """Tokens of one project, or all."""
    rows = tokens.list_tokens(db, project=project, limit=limit, offset=offset)
    return Tokens(tokens=tuple(rows))
