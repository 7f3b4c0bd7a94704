"""Events of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of an event file. `phase` is null for a line that is not a valid event; its text is kept."""

    attempt: str
    stream: str
    offset: int
    length: int
    ts: datetime | None
    seq: int | None
    phase: str | None
    event: str | None
    iteration: int | None
    epoch: int | None
    data: Mapping[str, Any]
    extra: Mapping[str, Any]
    fault: str | None
    text: str | None

    @property
    def cursor(self) -> tuple[int, int]:
        """Position among the job's events: (attempt number, byte offset)."""
        return int(self.attempt.rpartition(".")[2]), self.offset


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Events in order. `next` is the cursor of the page that follows."""

    events: tuple[Event, ...]
    next: str | None
