"""Projects: every name that a job, a token, a budget or a granted target carries."""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Projects:
    projects: tuple[Project, ...]
