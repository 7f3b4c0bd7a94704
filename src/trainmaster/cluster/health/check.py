"""`check` on a cluster: each node alone and all at once, then collectives between the healthy ones.

    target = targets.load("ssh:hosts.yaml")
    health = check(target, plan(2), profiles.resolve(["H200"]), home=home)      a ClusterHealth with its verdict

The CLI adds arguments, a progress line and files around it; an API or a notebook can call it as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainmaster import __version__, checks
from trainmaster.checks import document
from trainmaster.checks.expectations import COLLECTIVES, unmeasured
from trainmaster.checks.profiles import Resolved
from trainmaster.cluster.collectives import run as collectives
from trainmaster.cluster.health.gather import TIMEOUT_S, CheckRequest, Watch, gather
from trainmaster.cluster.sagemaker import check as sagemaker_check
from trainmaster.cluster.sagemaker.check import SageMakerNodes
from trainmaster.core.errors import UsageError
from trainmaster.core.health import ClusterHealth
from trainmaster.targets import ReachesNodes, Submission


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """Checks of each node, and whether collectives follow."""

    level: int
    names: tuple[str, ...]
    collectives: bool
    whole: bool = True  # not narrowed by --only: every stated expectation must be measured


def plan(level: int, only: Sequence[str] = (), skip: Sequence[str] = ()) -> ClusterPlan:
    """The checks of a level, as --only and --skip narrow them. UsageError for an unknown name."""
    name = collectives.NAME
    if name in only and level < collectives.LEVEL:
        raise UsageError(f"{name} needs --level {collectives.LEVEL}; this is level {level}")
    together = level >= collectives.LEVEL and name not in skip and (not only or name in only)
    whole = not only
    if list(only) == [name]:
        only = ["gpu_count", "hostname"]  # a node takes part only after it answered alone
    names = checks.plan(level, [n for n in only if n != name], [n for n in skip if n != name])
    return ClusterPlan(level=level, names=tuple(names), collectives=together, whole=whole)


def check(
    target: ReachesNodes,
    planned: ClusterPlan,
    known: Resolved,
    *,
    home: Path,
    timeout_s: float | None = None,
    bundle: Path | None = None,
    watch: Watch | None = None,
    on_collectives: Callable[[], None] | None = None,
) -> ClusterHealth:
    """Run the plan on every node of a target. `timeout_s` bounds one node; `bundle` is the folder for captures."""
    request = _request(planned, known, timeout_s or TIMEOUT_S[planned.level])
    access = target.open_nodes(limit_s=request.timeout_s, home=home, retest=True)
    health = gather(access, request, bundle=bundle, watch=watch)
    if planned.whole:
        health = add_unmeasured(health, known, planned)
    if not planned.collectives:
        return health
    if on_collectives is not None:
        on_collectives()
    result = collectives.measure(health, target, home=home, level=planned.level, timeout_s=timeout_s, bundle=bundle)
    return replace(health, cluster=(*health.cluster, result), took_s=round(health.took_s + result.took_s, 3))


def check_job(
    hosts: SageMakerNodes,
    planned: ClusterPlan,
    known: Resolved,
    *,
    timeout_s: float | None = None,
    bundle: Path | None = None,
    watch: Watch | None = None,
    on_state: Callable[[str], None] | None = None,
    on_note: Callable[[str], None] | None = None,
) -> ClusterHealth:
    """Run the plan as one job of a target whose nodes cannot be reached one by one.

    Its progress is told by `on_state`, and by `on_note` its name and its cost.
    """
    health = sagemaker_check.gather(
        hosts, _job_request(planned, known, timeout_s), tests=planned.collectives, bundle=bundle,
        watch=watch or Watch(), on_state=on_state, on_note=on_note,
    )  # fmt: skip
    return add_unmeasured(health, known, planned) if planned.whole else health


def plan_job(hosts: SageMakerNodes, planned: ClusterPlan, known: Resolved, *, timeout_s: float | None) -> Submission:
    """The CreateTrainingJob request and the files beside it; nothing is created."""
    return sagemaker_check.plan(
        hosts, _job_request(planned, known, timeout_s), tests=planned.collectives, attempt=sagemaker_check.DRY_RUN,
        folder=Path("JOB"),
    )  # fmt: skip


def _job_request(planned: ClusterPlan, known: Resolved, timeout_s: float | None) -> CheckRequest:
    return _request(planned, known, timeout_s or sagemaker_check.RUN_S[planned.level])


def _request(planned: ClusterPlan, known: Resolved, timeout_s: float) -> CheckRequest:
    return CheckRequest(
        level=planned.level,
        expect=document.stated(known.expect),
        profile=known.profile,
        planned=planned.names,
        version=__version__,
        timeout_s=timeout_s,
    )


def add_unmeasured(health: ClusterHealth, known: Resolved, planned: ClusterPlan) -> ClusterHealth:
    """Errors for stated expectations that this plan does not measure: on each node, or between the nodes."""
    left_out = [name for name in checks.plan(planned.level) if name not in planned.names]
    left = unmeasured(known.expect, level=planned.level, left_out=left_out, alone=not planned.collectives)
    own = tuple(result for result in left if result.check != COLLECTIVES)
    names = tuple(result.check for result in own)
    nodes = tuple(
        replace(node, planned=(*node.planned, *names), results=(*node.results, *own)) for node in health.nodes
    )
    between = tuple(result for result in left if result.check == COLLECTIVES)
    return replace(health, nodes=nodes, cluster=(*health.cluster, *between))
