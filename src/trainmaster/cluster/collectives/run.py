"""Collectives across the nodes of a cluster, after each node was checked alone: plan, run, judge."""

from __future__ import annotations

import time
from pathlib import Path

from trainmaster.checks.document import clean
from trainmaster.cluster.collectives import launch
from trainmaster.cluster.collectives.findings import judge
from trainmaster.cluster.collectives.launch import Capabilities
from trainmaster.cluster.collectives.plan import choose, keep_output, plan
from trainmaster.cluster.termination import run
from trainmaster.core.errors import NodeUnavailable
from trainmaster.core.health import ClusterHealth
from trainmaster.core.results import CheckResult, Finding, Verdict
from trainmaster.targets import ReachesNodes

NAME = "collectives"
LEVEL = 2
TIMEOUT_S = {2: 600.0, 3: 3600.0}  # of the whole run, by level


def measure(
    health: ClusterHealth,
    target: ReachesNodes,
    *,
    home: Path,
    level: int,
    timeout_s: float | None,
    bundle: Path | None = None,
) -> CheckResult:
    """The result of the cluster's collectives. Always has findings: what was planned is reported."""
    started = time.monotonic()
    total_s = timeout_s or TIMEOUT_S[level]
    findings = run(_measure(health, target, home=home, level=level, total_s=total_s, bundle=bundle))
    took_s = round(time.monotonic() - started, 3)
    return clean([CheckResult(check=NAME, findings=tuple(findings), took_s=took_s)])[0]


async def _measure(
    health: ClusterHealth, target: ReachesNodes, *, home: Path, level: int, total_s: float, bundle: Path | None
) -> list[Finding]:
    fit, left_out = choose(health)
    # A single node is asked too: its own GPUs may form a run.
    capabilities: dict[str, Capabilities | NodeUnavailable] = {}
    access = target.open_nodes(limit_s=total_s + launch.CAPABILITIES_TIMEOUT_S, home=home)
    try:
        by_name = {node.name: node for node in await access.nodes()}
        if fit:
            capabilities = await launch.query_capabilities(
                [by_name[node.node] for node in fit], access, timeout_s=min(total_s, launch.CAPABILITIES_TIMEOUT_S)
            )
        planned, more = plan(fit, capabilities, by_name, level=level, total_s=total_s)
        if planned is None:
            return [*left_out, *more]
        jobs = [(node, planned.programs(number)) for number, node in enumerate(planned.nodes)]
        outcomes = await launch.run_together(jobs, access, timeout_s=total_s)
    finally:
        await access.close()
    if bundle is not None:
        keep_output(bundle / NAME, planned, outcomes)
    return [*judge(planned, outcomes, left_out=[f.device or "" for f in (*left_out, *more)]), *left_out, *more]


def summary(result: CheckResult) -> str:
    """One line for the terminal."""
    good = next((finding.reason for finding in result.findings if finding.verdict is Verdict.PASS), None)
    return f"collectives: {good or result.verdict} in {result.took_s:.1f} s"
