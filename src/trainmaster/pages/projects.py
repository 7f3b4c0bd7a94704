"""Projects with their jobs, tokens, budgets and targets. A project is a name: there is no row of its own."""

from __future__ import annotations

from trainmaster.api.projects import Project, Projects
from trainmaster.store.database import Database
from trainmaster.store.page_rows import projects

Page = Projects


def read(db: Database, *, project: str | None = None) -> Projects:
    """One project, or all that anything is named by."""
    with db.read() as conn:
        jobs = projects.count_jobs(conn, project=project)
        tokens = projects.count_tokens(conn, project=project)
        caps = projects.list_caps(conn, project=project)
        granted = projects.list_granted(conn, project=project)
    names = sorted({*jobs, *tokens, *(name for name, _ in caps), *granted})
    return Projects(
        projects=tuple(
            Project(
                name=name,
                jobs=jobs.get(name, (0, 0))[0],
                open_jobs=jobs.get(name, (0, 0))[1],
                tokens=tokens.get(name, 0),
                month_cap_cents=caps.get((name, "month")),
                total_cap_cents=caps.get((name, "total")),
                targets=granted.get(name, ()),
            )
            for name in names
        )
    )
