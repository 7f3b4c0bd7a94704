"""Pre-flights as rows, turned back into the health of nodes: what `check` writes, so that one code judges both."""

from __future__ import annotations

from collections.abc import Collection

from trainmaster.core.health import NodeHealth
from trainmaster.core.results import CheckResult
from trainmaster.pages.parts.preflights import read_findings
from trainmaster.store.nodes import Checked


def build(checked: Checked, *, planned: Collection[str] = ()) -> NodeHealth:
    """The health of one node. `planned`: what its pre-flight announced; a check of it without a row was not measured.

    It is never known to be a whole run (`left_out`): a job chooses the level of its pre-flight.
    """
    results = tuple(CheckResult(check=name, findings=read_findings(raw), took_s=0.0) for name, raw in checked.rows)
    return NodeHealth(
        node=checked.node,
        level=0,
        planned=tuple(dict.fromkeys([*planned, *(result.check for result in results)])),
        results=results,
        left_out=("not stated",),
        started_at=checked.at.isoformat(),
    )
