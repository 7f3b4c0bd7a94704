"""Findings of a collective run over several nodes, from rank 0's report and each node's word on its own ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainmaster.bench.collectives import Report, Row
from trainmaster.bench.collectives.result import PLANNED
from trainmaster.cluster.collectives.launch import Outcome, last_line
from trainmaster.cluster.collectives.plan import Plan
from trainmaster.core.errors import SpecError
from trainmaster.core.results import Finding, Verdict, error, fail, skip, warn
from trainmaster.core.schema import build
from trainmaster.targets import Result

_ABORT = -6  # a rank ends so because another one left


def judge(plan: Plan, outcomes: Sequence[Outcome], *, left_out: Sequence[str] = ()) -> list[Finding]:
    """Findings of a run, from rank 0's report and each node's word on its own ranks."""
    ranks = _evidence(plan, outcomes)
    first = outcomes[0]
    report, rows = read(first[0].out) if isinstance(first, Sequence) else (None, [])
    if report is None:
        return [*_attribute(plan, outcomes, ranks), *_curves(plan, rows)]
    by_check = {result.check: result.findings for result in report.results}
    values = {"nodes": [node.name for node in plan.nodes], "ranks": plan.world, "backend": plan.backend}
    findings: list[Finding] = []
    if report.lost:
        for lost, finding in zip(report.lost, by_check.get("collective_ranks", ()), strict=False):
            node = plan.node_of(lost.rank) if lost.rank is not None and lost.rank < plan.world else None
            evidence = ranks.get(lost.rank) if lost.rank is not None else None
            findings.append(_at(finding, node, lost.host, evidence))
    else:
        without = f"; without {', '.join(left_out)}" if left_out else ""
        for finding in by_check.get("collective_ranks", ()):
            findings.append(replace(finding, reason=finding.reason + without, values={**finding.values, **values}))
    for finding in by_check.get("collective_data", ()):
        rank = finding.values.get("rank")
        known = isinstance(rank, int) and 0 <= rank < plan.world
        findings.append(
            _at(finding, plan.node_of(rank) if known and isinstance(rank, int) else None, finding.device, None)
        )
    findings += by_check.get("collective_transport", ())
    findings += _speed(plan, report, by_check.get("collective_bandwidth", ()))
    if missing := [name for name in PLANNED if not by_check.get(name)]:
        findings.append(error(f"the report of rank 0 lacks {', '.join(missing)}", action="run it again"))
    return findings


def read(output: str) -> tuple[Report | None, list[Row]]:
    """Rank 0's report if it was printed; else the rows up to then."""
    rows: list[Row] = []
    for line in output.splitlines():
        try:
            record = json.loads(line)
            if "row" in record:
                rows.append(build(Row, record["row"]))
            else:
                plain = record["report"]
                return build(Report, {k: v for k, v in plain.items() if k not in ("overall", "exit_code")}), rows
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SpecError):
            continue  # a library's output, or a partial line
    return None, rows


def _at(finding: Finding, node: str | None, host: str | None, evidence: str | None) -> Finding:
    """A finding about a rank, with the node's name in the hosts file, which may differ from its hostname."""
    if node is None:
        return replace(finding, device=None)
    reason, action = finding.reason, finding.action
    if host and host != node:
        reason, action = reason.replace(f"on {host}", f"on {node}"), action and action.replace(host, node)
    reported = f"; its node reports: {evidence}" if evidence else ""
    return replace(finding, device=node, reason=reason + reported, action=action)


def _speed(plan: Plan, report: Report, judged: Sequence[Finding]) -> Iterator[Finding]:
    """Each collective's curve with its verdict. Measured but not judged is a warning on GPUs, as for every rate."""
    for finding in judged:
        name = finding.values.get("collective")
        if name is None:
            if finding.verdict is not Verdict.ERROR or not report.rows:
                yield finding
            continue  # "measured, not judged" is reported for each collective below
        rows = [row for row in report.rows if row.collective == name]
        values = {**finding.values, **_values(plan, rows, report.transport)}
        if finding.verdict is Verdict.SKIP and plan.backend == "nccl":
            action = "state what it should reach: --expect busbw_gbps=N"
            yield warn(finding.reason.replace("; --min-busbw sets your own", ""), action=action, **values)
        else:
            yield replace(finding, values=values, reason=finding.reason.replace("--min-busbw", "--expect busbw_gbps=N"))


def _curves(plan: Plan, rows: Sequence[Row]) -> Iterator[Finding]:
    """Rows measured before the run broke: kept, not judged."""
    for name in dict.fromkeys(row.collective for row in rows):
        measured = [row for row in rows if row.collective == name]
        reason = f"{name}: {len(measured)} sizes measured before the run broke; not judged"
        yield skip(reason, proof=reason, collective=name, **_values(plan, measured, ""))


def _values(plan: Plan, rows: Sequence[Row], transport: str) -> dict[str, Any]:
    """Values in the form that the report draws as curves (report/health/curves.py)."""
    return {
        "ranks": plan.world,
        "node_count": len(plan.nodes),
        "backend": plan.backend,
        **({"transport": transport} if transport else {}),
        "busbw_gbps": {str(row.size_bytes): round(row.busbw_gbps, 3) for row in rows},
        "points": [
            {
                "size_bytes": row.size_bytes,
                "busbw_gbps": round(row.busbw_gbps, 3),
                "latency_us": round(row.median_us, 1),
            }
            for row in rows
        ],
    }


def _evidence(plan: Plan, outcomes: Sequence[Outcome]) -> dict[int, str]:
    """By rank, its own node's explanation of a loss."""
    by_rank: dict[int, str] = {}
    for number, outcome in enumerate(outcomes):
        if outcome is None:
            continue
        for local in range(plan.per_node):
            if not isinstance(outcome, Sequence):
                words: str | None = outcome.reason
            else:
                words = _end_of(outcome[local])
            if words is not None:
                by_rank[number * plan.per_node + local] = words
    return by_rank


def _end_of(result: Result) -> str | None:
    if result.code is None:
        if result.state in ("T", "t"):
            return "its process is stopped (SIGSTOP, or a debugger holds it)"
        return None  # still running: it waits like the others
    if result.code < 0 and result.code != _ABORT:
        return f"its process was killed by signal {-result.code}"
    return None


def _attribute(plan: Plan, outcomes: Sequence[Outcome], evidence: Mapping[int, str]) -> list[Finding]:
    """Findings where rank 0 gave no report: lost or stopped ranks by name; else rank 0's output, unattributed."""
    nodes: dict[str, str] = {}
    for rank, words in evidence.items():
        nodes.setdefault(plan.node_of(rank), f"rank {rank} on {plan.node_of(rank)}: {words}")
    if nodes:
        return [
            fail(
                f"{reason}; the collectives of {plan.world} ranks did not finish",
                action=f"run `trainmaster check --level 2` on {node} alone, then all together again",
                device=node,
            )
            for node, reason in nodes.items()
        ]
    first = outcomes[0]
    printed = _last_output(first[0]) if isinstance(first, Sequence) else "nothing"
    bad = [
        f"rank {number * plan.per_node + local} on {plan.nodes[number].name}: {_last_output(result)}"
        for number, outcome in enumerate(outcomes)
        if isinstance(outcome, Sequence)
        for local, result in enumerate(outcome)
        if result.code not in (0, None) and (number or local)
    ]
    others = f"; {'; '.join(bad[:3])}" if bad else ""
    reason = f"{plan.world} ranks on {len(plan.nodes)} nodes gave no report; rank 0 printed: {printed}{others}"
    action = f"check that every node reaches {plan.master[0]} (or set `address` in the hosts file), then run again"
    return [error(reason, action=action)]


def _last_output(result: Result) -> str:
    how = "still running at the deadline" if result.code is None else f"ended with {result.code}"
    return f"{last_line(result.err)} ({how})"
