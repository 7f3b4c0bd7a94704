"""Collectives of a saved run, judged again by expectations that the run did not have.

The measurements are in no node's capture, so the kept values decide: bandwidth by its largest size, the transport by
the words of its proof. What they do not show is an error: run the collectives again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainmaster.bench import limits
from trainmaster.cluster.collectives.plan import expected_transport
from trainmaster.core.health import NodeHealth
from trainmaster.core.results import CheckResult, Finding, Verdict, error, fail, ok

_AGAIN = "run the collectives again: `trainmaster check --level 2 --on TARGET` with this expectation"
_TCP = re.compile(r"\bsockets?\b|\bTCP\b", re.IGNORECASE)
_BETWEEN = re.compile(r"(\S+) (?:between nodes|somewhere) \(")


def rejudge(kept: CheckResult, nodes: Sequence[NodeHealth], overrides: Mapping[str, Any]) -> CheckResult:
    """The kept result, judged by those of `overrides` about collectives that it was not judged by before."""
    findings = list(kept.findings)
    least = overrides.get("busbw_gbps")
    if least is not None and any(node.expect.get("busbw_gbps") != least for node in nodes):
        findings = _judge_bandwidth(findings, float(least))
    if overrides.get("collectives") and not any(_is_measured(finding) for finding in findings):
        findings.append(error("collectives=true is expected, and the run measured none", action=_AGAIN))
    for wanted in _new_transports(findings, nodes, overrides):
        findings.append(_judge_transport(findings, wanted))
    return replace(kept, findings=tuple(findings))


def _judge_bandwidth(findings: Sequence[Finding], least: float) -> list[Finding]:
    judged = [_by_floor(finding, least) if _is_measured(finding) else finding for finding in findings]
    if not any(_is_measured(finding) for finding in findings):
        judged.append(error(f"busbw_gbps={least:g} is expected, and the run kept no bandwidth", action=_AGAIN))
    return judged


def _by_floor(finding: Finding, least: float) -> Finding:
    name = str(finding.values["collective"])
    try:
        seen = {int(size): float(gbps) for size, gbps in finding.values["busbw_gbps"].items()}
    except (TypeError, ValueError):
        return error(f"{name}: the kept bandwidths cannot be read", action=_AGAIN)
    judged = limits.judge(None, seen, baselines=(), least_gbps=least, collective=name)
    return replace(judged, values={**finding.values, **judged.values})


def _is_measured(finding: Finding) -> bool:
    measured = finding.values.get("busbw_gbps")
    return "collective" in finding.values and isinstance(measured, Mapping) and bool(measured)


def _new_transports(
    findings: Sequence[Finding], nodes: Sequence[NodeHealth], overrides: Mapping[str, Any]
) -> list[str]:
    """Transports that are expected now and were not when the run was judged."""
    backend = next((str(finding.values["backend"]) for finding in findings if "backend" in finding.values), "nccl")
    transports: dict[str, None] = {}
    for node in nodes:
        before = expected_transport(node.expect, backend, nodes=len(nodes))
        after = expected_transport({**node.expect, **overrides}, backend, nodes=len(nodes))
        if after is not None and after != before:
            transports[after] = None
    return list(transports)


def _judge_transport(findings: Sequence[Finding], wanted: str) -> Finding:
    """Verdict by the proof that the run kept. Only what its words show without doubt passes or fails."""
    transports = [str(finding.values[name]) for finding in findings for name in ("carried", "transport")
            if finding.values.get(name)]  # fmt: skip
    words = next(iter(transports), "nothing that was kept")
    reason = f"{wanted} is expected, and the run was carried by {words}"
    if any(finding.verdict in (Verdict.ERROR, Verdict.FAIL) and "carried" in finding.values for finding in findings):
        return error(f"{reason}; its own proof was not whole", action=_AGAIN)
    tcp = any(_TCP.search(transport) for transport in transports)
    between = {word for transport in transports for word in _BETWEEN.findall(transport)}
    if wanted == "Socket" and tcp:
        return ok(reason, carried=words)
    if tcp:
        return fail(reason, action=_AGAIN, carried=words)
    if wanted == "IB" and between and all(word.startswith(("NET/IB", "COLLNET")) for word in between):
        return ok(reason, carried=words)
    return error(f"{reason}: that does not prove it", action=_AGAIN, carried=words)
