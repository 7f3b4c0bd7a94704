"""What is recorded of a job, as the ledger reads it. Times are whole microseconds since 1970, of the server's clock
but for those of marks, which are of a node's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from trainmaster.core.states import Stage


def to_us(when: datetime) -> int:
    """Microseconds since 1970. Exact: a float of seconds has four times the precision that is needed until 2100."""
    return round(when.timestamp() * 1_000_000)


class Mark(NamedTuple):
    """One event of a node; `at` None: it has no time."""

    at: int | None
    phase: str
    event: str
    data: Mapping[str, Any]


class StageChange(NamedTuple):
    """A job entered a stage; None: it is final."""

    at: int
    stage: Stage | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptHistory:
    """One attempt: when its target first said that it runs, when all was given back, and what its first node wrote."""

    number: int
    started: int | None = None
    released: int | None = None
    gone: int | None = None  # when the last machine rented for it was gone, where that is later than the release
    marks: Sequence[Mark] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """One job. `trainer`: it runs our trainer, whose events are complete; else what is not told is unknown."""

    created: int
    stages: Sequence[StageChange]
    attempts: Sequence[AttemptHistory] = ()
    gpus: int = 1
    trainer: bool = False
    stall_us: int | None = None  # silence that counts as a stall (limits.stall_minutes); None: none does
    steps_before: int = 0  # steps that earlier jobs of the same run have trained
