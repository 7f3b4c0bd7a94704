"""Projects with their jobs, tokens, targets, and what they may spend and hold. A project is a name: it has no row."""

from __future__ import annotations

from datetime import UTC, datetime

from trainmaster.api.projects import Project, Projects
from trainmaster.pages import budgets
from trainmaster.queueing.state import Share
from trainmaster.store.capacity import devices
from trainmaster.store.database import Database
from trainmaster.store.page_rows import projects

Page = Projects


def read(db: Database, *, project: str | None = None, now: datetime | None = None) -> Projects:
    """One project, or all that anything is named by."""
    now = now or datetime.now(UTC)
    with db.read() as conn:
        jobs = projects.count_jobs(conn, project=project)
        tokens = projects.count_tokens(conn, project=project)
        granted = projects.list_granted(conn, project=project)
        held = devices.count_held(conn)
        shares = devices.list_shares(db)
        caps = {(line.project, line.period): line for line in budgets.read(db, project=project, now=now).budgets}
    shared = {name for name in {*shares, *held} if project in (None, name)}
    listed = []
    for name in sorted({*jobs, *tokens, *(name for name, _ in caps), *granted, *shared}):
        share, month, total = shares.get(name, Share()), caps.get((name, "month")), caps.get((name, "total"))
        listed.append(
            Project(
                name=name,
                jobs=jobs.get(name, (0, 0))[0],
                open_jobs=jobs.get(name, (0, 0))[1],
                tokens=tokens.get(name, 0),
                month_cap_cents=month.cap_cents if month is not None else None,
                total_cap_cents=total.cap_cents if total is not None else None,
                targets=granted.get(name, ()),
                month_spent=month.spent if month is not None else None,
                total_spent=total.spent if total is not None else None,
                weight=share.weight,
                quota=share.quota,
                devices=held.get(name, 0),
            )
        )
    return Projects(projects=tuple(listed))
