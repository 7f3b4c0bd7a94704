"""Projects: every name that a job, a token, a budget or a granted target carries."""

from __future__ import annotations

from dataclasses import dataclass

from trainmaster.api.costs import Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """One project, by what belongs to it."""

    name: str
    jobs: int
    open_jobs: int
    tokens: int  # that are not revoked
    month_cap_cents: int | None
    total_cap_cents: int | None
    targets: tuple[str, ...]  # granted to it
    month_spent: Cost | None = None  # this month (UTC); null: no attempt, and no budget
    total_spent: Cost | None = None
    weight: float = 1.0  # in our own queue
    quota: int | None = None  # devices at once in our own queue; null: no limit
    devices: int = 0  # of our own queue that its jobs hold now


@dataclass(frozen=True, slots=True, kw_only=True)
class Projects:
    projects: tuple[Project, ...]
