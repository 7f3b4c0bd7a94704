"""Summary of an acceptance run for people: the last lines of a container's log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainmaster.bench.accept.judge import ran_unjudged
from trainmaster.core import schema
from trainmaster.core.results import CheckResult


def is_unjudged(document: Mapping[str, Any]) -> bool:
    """Whether everything ran and only a baseline to judge the speed by is missing."""
    return ran_unjudged([schema.build(CheckResult, check) for check in document["checks"]])


def summarise(document: Mapping[str, Any]) -> str:
    """Verdict, figures, and what is not a pass with its action; one line each."""
    verdict = f"{document['overall']} (ran, not judged)" if is_unjudged(document) else str(document["overall"])
    lines = ["", f"acceptance test: {verdict}"]
    if "throughput_samples_per_second" in document:
        where = f"{document['nodes']} nodes, {document['world_size']} x {document['device']}"
        lines.append(f"  {document['model']}, batch {document['batch_size_per_gpu']} a rank, {where}")
        speed = f"  {document['throughput_samples_per_second']:,.0f} samples/s"
        baseline = document.get("baseline")
        against = f", baseline {baseline['samples_per_s']:,.0f} ({baseline['source']})" if baseline else ", no baseline"
        lines.append(speed + against)
    for check in document["checks"]:
        for finding in check["findings"]:
            device = f" {finding['device']}" if finding["device"] else ""
            if finding["verdict"] in ("fail", "error", "warn"):
                lines.append(f"  {finding['verdict'].upper()} {check['check']}{device}: {finding['reason']}")
                lines.append(f"    what to do: {finding['action']}")
    passed = [check["check"] for check in document["checks"] if _passes(check)]
    lines.append(f"  passed: {', '.join(passed) or 'nothing'}")
    return "\n".join(lines)


def _passes(check: Mapping[str, Any]) -> bool:
    verdicts = {finding["verdict"] for finding in check["findings"]}
    return "pass" in verdicts and verdicts <= {"pass", "skip"}
