"""Pre-flight checks of a job, on each node of each attempt."""

from __future__ import annotations

from collections.abc import Sequence

from trainmaster.api.iterations import Checks
from trainmaster.api.run import Preflight
from trainmaster.core.results import CheckResult
from trainmaster.pages.parts import preflights
from trainmaster.store import nodes
from trainmaster.store.database import Database

Page = Checks


def read(db: Database, job_id: str) -> Checks:
    """Every pre-flight check of a job."""
    return Checks(checks=tuple(nodes.list_checks(db, job_id)))


def read_nodes(
    db: Database, job_id: str, shown: Preflight, *, machines: Sequence[str] = ()
) -> tuple[tuple[str, Preflight], ...]:
    """The checks of an attempt on each of its nodes, by name; `shown` are those of its first node.

    A check that another node has reported is planned on all. One of the `machines` that reported none has them all
    missing.
    """
    results: dict[str, dict[str, tuple[CheckResult, float | None]]] = {name: {} for name in machines}
    for row in nodes.list_checks(db, job_id):
        if row.attempt == f"{job_id}.{shown.attempt}":
            result = CheckResult(
                check=row.check, findings=preflights.read_findings(row.findings), took_s=row.took_s or 0.0
            )
            results.setdefault(row.node, {})[row.check] = (result, row.took_s)
    planned = list(
        dict.fromkeys([row.check for row in shown.checks] + [name for of in results.values() for name in of])
    )
    over = shown.overall is not None
    return tuple(
        (name, preflights.shape(shown.attempt, of, planned=planned, over=over)) for name, of in results.items()
    )
