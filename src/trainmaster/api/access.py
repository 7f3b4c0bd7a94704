"""Access: tokens, the caller, and the audit trail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trainmaster.core.roles import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token without its secret."""

    id: int
    name: str
    role: Role
    project: str | None  # None: every project
    created_at: datetime
    used_at: datetime | None
    revoked_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """A token that was just created. `token` is shown only here and cannot be read again."""

    name: str
    role: Role
    project: str | None
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Me:
    """The identity of the caller."""

    name: str
    role: Role
    project: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One change, with the caller who requested it."""

    id: int
    at: datetime
    who: str  # a token's name, `loopback`, or `local` (the command line on the home folder)
    action: str
    subject: str
    detail: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    entries: tuple[AuditEntry, ...]
    limit: int
    offset: int
