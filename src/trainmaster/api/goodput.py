"""The goodput ledger: GPU-time and money by bin. Times are whole GPU-microseconds; the bins sum to the wall exactly."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from trainmaster.core.states import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class BinLine:
    """One bin: `gpu_us` GPU-microseconds, the same in hours, its share, and its money (null: not known)."""

    bin: str
    gpu_us: int
    gpu_hours: float
    share: float
    cents: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Bins and ratios of a job or a sum. A ratio is null before any time has passed, or where a part is not known.

    `ettr` counts unknown time as not productive, `ettr_most` as productive.
    """

    bins: tuple[BinLine, ...]
    gpu_us: int
    gpu_hours: float
    ettr: float | None
    ettr_most: float | None
    scheduling: float | None
    runtime: float | None
    program: float | None
    mpg: float | None  # scheduling × runtime × program
    cents: float | None  # null: nothing of it has a known price
    unpriced_jobs: int  # whose money is not in it


@dataclass(frozen=True, slots=True, kw_only=True)
class JobGoodput:
    """The ledger of one job, in all or in a month. A GPU is a rank of the spec."""

    id: str
    name: str
    project: str
    target: str
    status: Status
    gpus: int
    month: str | None
    started_at: datetime
    ended_at: datetime  # of the ledger: when the last thing was given back, or now
    goodput: Goodput
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputSum:
    """The sum over the jobs of a project, a target or a month."""

    name: str
    jobs: int
    goodput: Goodput


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputPage:
    """The sum over all jobs in view, and by project, target and month; the jobs with the most lost GPU-time first."""

    month: str | None  # as 2026-11; None: from the beginning
    project: str | None
    total: GoodputSum
    projects: tuple[GoodputSum, ...]
    targets: tuple[GoodputSum, ...]
    months: tuple[GoodputSum, ...]
    jobs: tuple[JobGoodput, ...]
    more: int  # jobs that are not listed; the sums include them
    made_at: datetime
