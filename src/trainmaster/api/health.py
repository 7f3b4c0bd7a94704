"""Health of a server, and the body of every error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    message: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Liveness of the server and state of its reconciler."""

    status: Literal["ok", "failing"]
    version: str
    reconciler: Literal["off", "starting", "running", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Readiness for work, with the reasons where it is not ready."""

    ready: bool
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultShape:
    """One fault in a request: its field and the reason."""

    path: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorShape:
    """An error. `code` is stable and for programs; `message` is for people and may change."""

    code: str
    message: str
    faults: tuple[FaultShape, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """The body of every answer that is not a success."""

    error: ErrorShape
