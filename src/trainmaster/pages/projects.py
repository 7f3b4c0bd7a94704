"""Projects with their jobs, tokens, targets, and what they may spend and hold. A project is a name: it has no row."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from trainmaster import targets
from trainmaster.api.costs import Cost
from trainmaster.api.projects import Project, Projects
from trainmaster.core.money.cost import month_of
from trainmaster.pages.job_cost import cost
from trainmaster.pages.parts.usage import sum_up
from trainmaster.queueing.state import Share
from trainmaster.store import costs
from trainmaster.store.capacity import devices
from trainmaster.store.costs import GroupSum
from trainmaster.store.database import Database
from trainmaster.store.page_rows import projects
from trainmaster.store.page_rows.kept_sums import Recall

Spent = tuple[Sequence[GroupSum], Sequence[GroupSum]]  # this month (UTC), and in all


def read_spent(db: Database, *, project: str | None = None, now: datetime | None = None) -> Spent:
    """What was spent. Every attempt is in it, which takes a while where there are thousands."""
    now = now or datetime.now(UTC)
    with db.read() as conn:
        charges = costs.list_charges(conn, project=project, closed=False)
        free = [name for name in targets.names() if targets.is_free(name)]
        windows = [month_of(now), None]
        month, ever = costs.sum_groups(
            conn, charges, project=project, free=free, now=now, windows=windows, recall=Recall(db, conn)
        )
    return month, ever


def read(
    db: Database, *, project: str | None = None, now: datetime | None = None, spent: Spent | None = None
) -> Projects:
    """One project, or all that anything is named by; `spent` where it is known."""
    month, ever = spent or read_spent(db, project=project, now=now)
    with db.read() as conn:
        jobs = projects.count_jobs(conn, project=project)
        tokens = projects.count_tokens(conn, project=project)
        granted = projects.list_granted(conn, project=project)
        held = devices.count_held(conn)
        shares = devices.list_shares(db)
        caps = {(row.project, row.period): row.cap_cents for row in costs.list_budgets(conn, project=project)}
    shared = {name for name in {*shares, *held} if project in (None, name)}
    listed = []
    for name in sorted({*jobs, *tokens, *(name for name, _ in caps), *granted, *shared}):
        share, in_month, in_all = shares.get(name, Share()), caps.get((name, "month")), caps.get((name, "total"))
        listed.append(
            Project(
                name=name,
                jobs=jobs.get(name, (0, 0))[0],
                open_jobs=jobs.get(name, (0, 0))[1],
                tokens=tokens.get(name, 0),
                month_cap_cents=in_month,
                total_cap_cents=in_all,
                targets=granted.get(name, ()),
                month_spent=_spent(month, name, capped=in_month is not None),
                total_spent=_spent(ever, name, capped=in_all is not None),
                weight=share.weight,
                quota=share.quota,
                devices=held.get(name, 0),
            )
        )
    return Projects(projects=tuple(listed))


def _spent(groups: Sequence[GroupSum], project: str, *, capped: bool) -> Cost | None:
    """What a project has spent; None where no attempt was ever placed and there is no cap."""
    own = [group for group in groups if group.project == project]
    return cost(sum_up(own)) if own or capped else None
