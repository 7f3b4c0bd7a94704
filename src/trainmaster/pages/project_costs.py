"""The cost of each project: this month (UTC), in total, and per hour now. GPU hours of projects, persons, targets."""

from __future__ import annotations

from datetime import UTC, datetime

from trainmaster import targets
from trainmaster.api.costs import Costs, ProjectCost
from trainmaster.core.money.cost import Span, burn, month_of
from trainmaster.pages.job_cost import cost
from trainmaster.pages.parts.usage import by_person, by_target, list_lines, sum_up
from trainmaster.store import costs
from trainmaster.store.database import Database
from trainmaster.store.page_rows.kept_sums import Recall


def read(db: Database, *, project: str | None = None, now: datetime | None = None) -> Costs:
    """One project, or all."""
    now = now or datetime.now(UTC)
    with db.read() as conn:
        charges = costs.list_charges(conn, project=project, closed=False)
        free = [name for name in targets.names() if targets.is_free(name)]
        windows = [month_of(now), None]
        month, ever = costs.sum_groups(
            conn, charges, project=project, free=free, now=now, windows=windows, recall=Recall(db, conn)
        )
    going: dict[str, list[Span]] = {name: [] for name in sorted({group.project for group in ever})}
    for charge in charges:
        going[charge.project].extend(charge.spans)
    projects = []
    for name, spans in going.items():
        own, whole = ([group for group in groups if group.project == name] for groups in (month, ever))
        projects.append(
            ProjectCost(
                project=name,
                month=cost(sum_up(own)),
                total=cost(sum_up(whole)),
                cents_per_hour=burn(spans),
                month_gpu_hours=sum(group.gpu_hours for group in own),
                total_gpu_hours=sum(group.gpu_hours for group in whole),
            )
        )
    return Costs(
        month=f"{now:%Y-%m}",
        projects=tuple(projects),
        people=list_lines(month, by_person),
        targets=list_lines(month, by_target),
    )
