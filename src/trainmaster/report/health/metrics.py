"""`health_check_metrics.json`: the metrics file of the SageMaker health check (docs/how/health-report.md).

A field is filled from the finding that measured it, and is null (or "NOT_MEASURED") if none did. The verdict is FAIL
where anything failed, and never PASS for what was not measured.
"""

from __future__ import annotations

import json
from typing import Any

from trainmaster.core.results import Overall
from trainmaster.report.health import curves, sanitise
from trainmaster.report.health.metrics_node import (
    bad_rows,
    describe_node,
    gpus_expected,
    issue_text,
    processes_per_node,
    summarise,
)
from trainmaster.report.health.view import Row, View


def render(view: View) -> str:
    """The complete document."""
    return json.dumps(sanitise.plain(document(view)), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def document(view: View) -> dict[str, Any]:
    rows = list(view.rows)
    curve_list = curves.find(rows)
    gpus = [gpus_expected(node) for node in view.nodes]
    # One number only where all nodes agree; a mean of 8 and 7 describes no node.
    same = gpus[0] if gpus and len(set(gpus)) == 1 else None
    whole = view.coverage.nodes_heard == view.coverage.nodes_asked and not view.coverage.not_measured
    ranks = max((curve.ranks for curve in curve_list if curve.ranks and curve.node is None), default=None)
    nodes = len(view.nodes)
    each = {processes_per_node(node) for node in view.nodes}
    processes = ranks // nodes if ranks and nodes and ranks % nodes == 0 else None
    return {
        "timestamp": view.started_at or None,
        "cluster_info": {
            "data_completeness": "complete" if whole else "partial",
            "note": view.sentence,
            "expected_total_gpus": None if None in gpus or not gpus else sum(gpu or 0 for gpu in gpus),
            "cluster_topology": {
                "total_nodes": nodes,
                "gpus_per_node": same,
                "processes_per_node": each.pop() if len(each) == 1 and None not in each else processes,
            },
        },
        "cluster_summary": summarise(
            view.overall, rows, [f"{row.where}: {issue_text(row)}" for row in bad_rows(rows)], view
        ),
        "nodes": {
            f"node_{node.index}": describe_node(view, node) for node in sorted(view.nodes, key=lambda node: node.index)
        },
        **_ours(view, rows),
    }


def _ours(view: View, rows: list[Row]) -> dict[str, Any]:
    cost = view.cost
    return {
        "overall": str(view.overall),
        "reasons": list(view.reasons),
        "issues": [
            {
                "node": row.node,
                "check": row.check,
                "device": row.device,
                "verdict": str(row.verdict),
                "problem": row.reason,
                "root_cause": row.cause or row.reason,
                "action": row.action,
            }
            for row in bad_rows(rows)
        ],
        "recommendations": [
            {
                "action": action.action,
                "verdict": str(action.verdict),
                "nodes": list(action.nodes),
                "places": list(action.locations),
                "checks": list(action.checks),
            }
            for action in view.actions
        ],
        "training_readiness": {
            "ready": {Overall.FAIL: False, Overall.INCOMPLETE: None}.get(view.overall, True),
            "verdict": view.title,
            "why": view.sentence,
            "nodes_ready": [node.name for node in view.nodes if node.overall in (Overall.PASS, Overall.WARN)],
            "nodes_not_ready": [node.name for node in view.nodes if node.overall is Overall.FAIL],
            "nodes_unknown": [node.name for node in view.nodes if node.overall is Overall.INCOMPLETE],
        },
        "coverage": {name: getattr(view.coverage, name) for name in type(view.coverage).__dataclass_fields__},
        "cost": {
            "lines": list(cost.lines),
            "assumed_hours": cost.assumed_hours,
            "nodes_priced": cost.nodes_priced,
            "usd_per_hour": _money(cost.usd_per_hour),
            "failed_run_usd": _money(cost.wasted_usd),
            "check_usd": _money(cost.check_usd),
        },
        "took_s": view.took_s,
        "metrics": [
            {
                "node": row.node,
                "check": row.check,
                "device": row.device,
                "verdict": str(row.verdict),
                "reason": row.reason,
                "values": row.values,
            }
            for row in rows
        ],
    }


def _money(usd: float | None) -> float | None:
    return round(usd, 2) if usd is not None else None
