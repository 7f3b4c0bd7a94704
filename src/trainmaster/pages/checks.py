"""Pre-flight checks of a job, on each node of each attempt."""

from __future__ import annotations

from collections.abc import Sequence

from trainmaster.api.iterations import Checks
from trainmaster.api.run import Preflight
from trainmaster.core.plan import EVENTS_FILE, node_file
from trainmaster.core.results import CheckResult
from trainmaster.pages.parts import preflights
from trainmaster.store import nodes
from trainmaster.store.database import Database


def read(db: Database, job_id: str) -> Checks:
    """Every pre-flight check of a job."""
    return Checks(checks=tuple(nodes.list_checks(db, job_id)))


def read_nodes(
    db: Database, job_id: str, shown: Preflight, *, machines: Sequence[str] = (), over: bool = True
) -> tuple[tuple[str, Preflight], ...]:
    """The checks of an attempt on each of its nodes, by name; `shown` are those of its first node.

    A check that another node has reported is planned on all. One of the `machines` that reported none has them all
    missing, and so has one that ended without them; until all is `over`, the others may still report.
    """
    attempt = f"{job_id}.{shown.attempt}"
    streams = {name: node_file(EVENTS_FILE, number) for number, name in enumerate(machines)}
    ended = set(streams.values()) if over else nodes.list_ended_checks(db, attempt, list(streams.values()))
    results: dict[str, dict[str, tuple[CheckResult, float | None]]] = {name: {} for name in machines}
    for row in nodes.list_checks(db, job_id):
        if row.attempt == attempt:
            result = CheckResult(
                check=row.check, findings=preflights.read_findings(row.findings), took_s=row.took_s or 0.0
            )
            results.setdefault(row.node, {})[row.check] = (result, row.took_s)
    planned = list(
        dict.fromkeys([row.check for row in shown.checks] + [name for of in results.values() for name in of])
    )
    done = {name for name in results if name not in streams or streams[name] in ended}
    return tuple(
        (name, preflights.shape(shown.attempt, of, planned=planned, over=shown.overall is not None and name in done))
        for name, of in results.items()
    )
