"""Checks whose newest measurement on a node warns or fails: one that was not measured again keeps its verdict."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from trainmaster.core.results import CheckResult, Verdict
from trainmaster.pages.parts.preflights import read_findings
from trainmaster.store import nodes as store
from trainmaster.store.database import Connection
from trainmaster.store.nodes import MeasuredCheck

if TYPE_CHECKING:
    from trainmaster.cluster.health.history import Entry, Measured

ORDER = (Verdict.FAIL, Verdict.ERROR, Verdict.WARN, None, Verdict.SKIP, Verdict.PASS)  # worst first


def read(conn: Connection, history: Iterable[Entry], *, project: str | None) -> dict[str, list[Measured]]:
    """By node, the worst first: of the pre-flights of a project's jobs or of all, and of the operator's own checks."""
    from trainmaster.cluster.health.history import list_measured

    own = {(node, check): each for node, checks in list_measured(history).items() for check, each in checks.items()}
    rows = store.list_measured(
        conn, project=project, besides=[pair for pair, each in own.items() if each.verdict is not Verdict.PASS]
    )
    standing: dict[str, list[Measured]] = {}
    for node, check in sorted({*own, *rows}):
        known = [own[node, check]] if (node, check) in own else []
        known += [_to_measured(rows[node, check])] if (node, check) in rows else []
        newest = max(known, key=lambda each: each.at)
        if newest.verdict is not Verdict.PASS:
            standing.setdefault(node, []).append(newest)
    return {node: sorted(some, key=lambda each: ORDER.index(each.verdict)) for node, some in standing.items()}


def judge(verdict: Verdict | None, standing: list[Measured]) -> tuple[Verdict | None, str]:
    """The verdict of a node with that of its newest run; and, where an older run decides, the check that does."""
    if not standing or ORDER.index(standing[0].verdict) >= ORDER.index(verdict):
        return verdict, ""
    worst = standing[0]
    where = f"{worst.device} " if worst.device else ""
    return worst.verdict, f"{where}{worst.check}: {worst.reason} ({worst.at:%Y-%m-%d %H:%M} UTC, not measured since)"


def _to_measured(row: MeasuredCheck) -> Measured:
    from trainmaster.cluster.health.history import Measured

    result = CheckResult(check=row.check, findings=read_findings(row.findings), took_s=0.0)
    bad = next((finding for finding in result.findings if finding.verdict is row.verdict), result.findings[0])
    return Measured(check=row.check, verdict=row.verdict, at=row.at, reason=bad.reason[:300], device=bad.device)
