"""Results between the hosts of a SageMaker health check, from the health.json that its first host left in S3.

Pure. What the job had to measure and its results do not have is an error: the run is INCOMPLETE, never PASS. Nodes and
comparisons are not taken from there: they are judged here, from the answer of each host (cluster/health/gather.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainmaster.bench.collectives.result import PLANNED
from trainmaster.checks.document import clean
from trainmaster.cluster.collectives.run import NAME as COLLECTIVES
from trainmaster.cluster.health import compare
from trainmaster.cluster.sagemaker import node as sagemaker_node
from trainmaster.core.errors import SpecError
from trainmaster.core.health import ClusterHealth
from trainmaster.core.results import CheckResult, Finding, error, exit_code, ok
from trainmaster.core.states import TargetState
from trainmaster.targets import Poll

JOB = "training_job"  # result about the end of the job itself


def parse(text: str | None, hosts: Sequence[str]) -> ClusterHealth | str:
    """What the first host wrote, or why it cannot be used."""
    if text is None:
        return "the first host left no health.json"
    try:
        health = ClusterHealth.from_json(text)
    except (SpecError, ValueError, RecursionError) as error:
        return f"health.json of the first host cannot be parsed: {str(error)[:200]}"
    if health.asked != tuple(hosts):
        return f"health.json is about other hosts: {', '.join(health.asked)[:200]}"
    return health


def between(sent: ClusterHealth | str, hosts: Sequence[str], *, level: int, tests: bool) -> tuple[CheckResult, ...]:
    """Results of EFA, nccl-tests and collectives, with an error for each that is missing.

    `tests`: they were asked for; else every host was checked alone. `hosts`: those that answered.
    """
    if isinstance(sent, str):
        return (CheckResult.of(sagemaker_node.CHECK, [error(sent, action="read the log of algo-1 in CloudWatch")]),)
    own = [result for result in clean(sent.cluster) if result.check not in compare.NAMES]
    by_check: dict[str, list[Finding]] = {}
    for result in own:
        name = COLLECTIVES if result.check in (*PLANNED, COLLECTIVES) else result.check
        by_check.setdefault(name, []).extend(result.findings)
    wanted = [sagemaker_node.CHECK]
    wanted += [sagemaker_node.NCCL_CHECK] if tests and level >= 2 else []
    wanted += [sagemaker_node.EFA_CHECK] if tests and level >= 2 and len(sent.asked) > 1 else []
    for name in wanted:
        reported = {finding.device for finding in by_check.get(name, ())}
        by_check.setdefault(name, []).extend(
            error(f"no result of {name}", action="read the log of this host in CloudWatch", device=host)
            for host in hosts
            if host not in reported
        )
    if tests and _has_peers(by_check[sagemaker_node.CHECK], sent.asked):
        reported = {result.check for result in own if result.findings}
        missing = [name for name in PLANNED if name not in reported]
        by_check.setdefault(COLLECTIVES, []).extend(
            [error(f"no result of {', '.join(missing)}", action="read the log of algo-1 in CloudWatch")]
            if missing
            else []
        )
    return tuple(CheckResult.of(name, findings) for name, findings in by_check.items())


def end(poll: Poll, sent: ClusterHealth | str, health: ClusterHealth, facts: Mapping[str, Any]) -> CheckResult:
    """Result of the job's end. It fails by design on FAIL and INCOMPLETE; with any other verdict that is an error."""
    if poll.state is TargetState.SUCCEEDED:
        return CheckResult.of(JOB, [ok("it completed", **facts)])
    reason = f"it ended as {poll.state}: {poll.note}"[:400]
    if isinstance(sent, ClusterHealth) and exit_code(sent.overall) and exit_code(health.overall):
        return CheckResult.of(JOB, [ok(f"{reason}; so its own verdict, {sent.overall}, asks", **facts)])
    return CheckResult.of(JOB, [error(reason, action="read its logs in CloudWatch, then check again", **facts)])


def _has_peers(jobs: Sequence[Finding], hosts: Sequence[str]) -> bool:
    """Whether there were ranks to measure between: several hosts, or several GPUs on one."""
    return len(hosts) > 1 or any(finding.values.get("world_size") != 1 for finding in jobs)
