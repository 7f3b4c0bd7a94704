"""Bandwidth between the nodes of a target: one run of `bench/collectives` over all of them, and one verdict.

    found = measure(target, Request(words=("--max", "1G")), home=home)        a ClusterBandwidth with its verdict

Every node must take part: one that cannot makes the run INCOMPLETE, and is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainmaster.bench.collectives import Report, Row
from trainmaster.bench.collectives.result import PLANNED
from trainmaster.cluster.collectives import launch
from trainmaster.cluster.collectives.findings import judge, read
from trainmaster.cluster.collectives.launch import Capabilities, meeting_point
from trainmaster.cluster.collectives.pairs import choose_backend
from trainmaster.cluster.collectives.plan import Plan, keep_output
from trainmaster.cluster.termination import run
from trainmaster.core.errors import NodeUnavailable, UsageError
from trainmaster.core.results import CheckResult, Overall, error, judge_overall
from trainmaster.targets import Node, ReachesNodes

TOTAL_S = 3600.0
NODES_CHECK = "collective_nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Run on every node: words of `python -m trainmaster.bench.collectives`, and what is not the same everywhere."""

    words: Sequence[str] = ()
    backend: str | None = None
    processes: int | None = None  # ranks of each node; None: one per GPU, one without GPUs
    total_s: float = TOTAL_S
    env: Mapping[str, str] = field(default_factory=dict)  # of every rank, as NCCL_ALGO


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterBandwidth:
    """Outcome of a run. Without a report of rank 0, `rows` are those measured until it broke."""

    report: Report | None
    rows: tuple[Row, ...] = ()
    silent: Mapping[str, str] = field(default_factory=dict)
    results: tuple[CheckResult, ...] = ()

    @property
    def overall(self) -> Overall:
        return judge_overall(self.results, planned=PLANNED)


def measure(
    target: ReachesNodes,
    request: Request,
    *,
    home: Path,
    out: Path | None = None,
    on_nodes: Callable[[Sequence[str]], None] = lambda _: None,
) -> ClusterBandwidth:
    """Run the collectives on every node; `out` keeps what each rank printed."""
    return run(_measure(target, request, home, out, on_nodes))


async def _measure(
    target: ReachesNodes, request: Request, home: Path, out: Path | None, on_nodes: Callable[[Sequence[str]], None]
) -> ClusterBandwidth:
    access = target.open_nodes(limit_s=request.total_s + launch.CAPABILITIES_TIMEOUT_S, home=home)
    try:
        nodes = await access.nodes()
        on_nodes([node.name for node in nodes])
        offers = await launch.query_capabilities(nodes, access)
        silent = {name: offer for name, offer in offers.items() if isinstance(offer, NodeUnavailable)}
        ready = {name: offer for name, offer in offers.items() if isinstance(offer, Capabilities)}
        faults = {name: fault for name, offer in ready.items() if (fault := offer.find_fault(request.backend))}
        if faults:
            silent |= {name: NodeUnavailable(reason, action=action) for name, (reason, action) in faults.items()}
            return ClusterBandwidth(report=None, silent=_words(silent), results=_results((), silent))
        plan = plan_run([node for node in nodes if node.name in ready], ready, request)
        if plan is None:
            return ClusterBandwidth(report=None, silent=_words(silent), results=_results((), silent))
        jobs = [(node, plan.programs(number)) for number, node in enumerate(plan.nodes)]
        outcomes = await launch.run_together(jobs, access, timeout_s=request.total_s)
    finally:
        await access.close()
    if out is not None:
        keep_output(out / "ranks", plan, outcomes)
    first = outcomes[0]
    report, rows = read(first[0].out) if isinstance(first, Sequence) else (None, [])
    if report is not None:
        results: tuple[CheckResult, ...] = report.results
    else:
        results = (CheckResult.of(PLANNED[0], judge(plan, outcomes)),)
    return ClusterBandwidth(report=report, rows=tuple(rows), silent=_words(silent), results=_results(results, silent))


def plan_run(nodes: Sequence[Node], ready: Mapping[str, Capabilities], request: Request) -> Plan | None:
    """The ranks of every node that is ready; None where they are fewer than two."""
    backend = request.backend or choose_backend(ready)
    gpus = min((offer.gpus for offer in ready.values()), default=0)
    per_node = request.processes or (gpus if backend == "nccl" else 1)
    if len(nodes) * per_node < 2:
        return None
    first = ready[nodes[0].name]
    if not first.ports:
        raise UsageError(f"no free port from 20000 to 29999 on {nodes[0].name}; list its listeners: ss -ltn")
    words, master = (*request.words, "--backend", backend), meeting_point(nodes[0], first)
    return Plan(nodes=nodes, per_node=per_node, backend=backend, words=words, master=master, env=request.env)


def _words(silent: Mapping[str, NodeUnavailable]) -> dict[str, str]:
    return {name: unavailable.reason for name, unavailable in silent.items()}


def _results(results: Sequence[CheckResult], silent: Mapping[str, NodeUnavailable]) -> tuple[CheckResult, ...]:
    if not silent:
        return tuple(results)
    findings = tuple(
        error(f"{name} took no part: {unavailable.reason}", action=unavailable.action, device=name)
        for name, unavailable in silent.items()
    )
    return (*results, CheckResult.of(NODES_CHECK, findings))
