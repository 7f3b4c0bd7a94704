"""Plan of a collective run over several nodes: the nodes that take part, and the program of each rank.

Only nodes that answered and whose GPUs are healthy take part: a node that cannot join blocks all others. Every node
left out is reported with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainmaster.checks import facts
from trainmaster.cluster.collectives.launch import Capabilities, Outcome, environment, meeting_point
from trainmaster.core.errors import NodeUnavailable
from trainmaster.core.health import ClusterHealth, NodeHealth
from trainmaster.core.results import Finding, Verdict, error, skip
from trainmaster.targets import Node, Program

# Level 2: on NCCL the sizes with published figures of all_reduce; on gloo three sizes that show latency and rate.
# Level 3: every collective at every size.
_SIZES = {
    (2, "nccl"): ("--collective", "all_reduce", "--min", "128M", "--max", "16G"),
    (2, "gloo"): ("--collective", "all_reduce", "--min", "64K", "--max", "16M", "--factor", "16"),
    (3, "nccl"): ("--collective", "all"),
    (3, "gloo"): ("--collective", "all"),
}
_MUST_ANSWER = frozenset({"cuda_init", "gpu_count", "gpu_driver"})  # without their answer no GPU is known to work


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run: nodes in rank order, and the program of each."""

    nodes: Sequence[Node]
    per_node: int
    backend: str
    words: Sequence[str]
    master: tuple[str, int]
    env: Mapping[str, str] = field(default_factory=dict)  # of every rank, beside its place

    @property
    def world(self) -> int:
        return len(self.nodes) * self.per_node

    def node_of(self, rank: int) -> str:
        return self.nodes[rank // self.per_node].name

    def programs(self, node: int) -> list[Program]:
        return [
            Program(
                module="trainmaster.bench.collectives",
                words=self.words,
                env={
                    **self.env,
                    **environment(
                        rank=node * self.per_node + local, world=self.world, local_rank=local,
                        local_world=self.per_node, node=node, nodes=len(self.nodes), master=self.master,
                        name=self.nodes[node].name,
                    ),
                },
            )
            for local in range(self.per_node)
        ]  # fmt: skip


def choose(health: ClusterHealth) -> tuple[list[NodeHealth], list[Finding]]:
    """Nodes that take part, and a finding for each that does not. Those have a bad verdict of their own."""
    fit: list[NodeHealth] = []
    out = [
        skip(
            f"left out of the collectives: no answer ({silent.reason})",
            proof="the node is listed as silent",
            device=silent.node,
        )
        for silent in health.silent
    ]
    # A failed check of a GPU excludes the node: the run would measure the faulty GPU, or hang on it.
    of_gpus = facts.read().of_gpus
    for node in health.nodes:
        failed = [
            result
            for result in node.results
            if result.check in of_gpus
            and (result.verdict is Verdict.FAIL or (result.verdict is Verdict.ERROR and result.check in _MUST_ANSWER))
        ]
        if failed:
            names = ", ".join(f"{result.check} ({result.verdict})" for result in failed)
            out.append(
                skip(f"left out of the collectives: {names}", proof="these checks failed on the node", device=node.node)
            )
        else:
            fit.append(node)
    return fit, out


def plan(
    fit: Sequence[NodeHealth],
    capabilities: Mapping[str, Capabilities | NodeUnavailable],
    nodes: Mapping[str, Node],
    *,
    level: int,
    total_s: float,
) -> tuple[Plan | None, list[Finding]]:
    """The run that these nodes can do together, if any; and findings for nodes that cannot."""
    findings: list[Finding] = []
    ready: dict[str, Capabilities] = {}
    required = any(_wants(node) for node in fit)
    for node in fit:
        offer = capabilities[node.node]
        if not isinstance(offer, Capabilities):
            reason = f"it answered the checks but not the collectives: {offer.reason}"
            findings.append(error(reason, action=offer.action, device=node.node))
        elif offer.torch is None:
            reason = f"{offer.why} on {node.node}, so it takes no part in the collectives"
            findings.append(_missing(reason, "install torch for its Python", node.node, required=required))
        else:
            ready[node.node] = offer
    gpus = {name: offer.gpus for name, offer in ready.items()}
    if any(gpus.values()) or any(_expects_gpus(node) for node in fit):
        for name in [name for name, count in gpus.items() if not count]:
            reason = "its torch sees no GPU, while other nodes or the profile have some"
            findings.append(error(reason, action="install torch with CUDA on it, or leave it out", device=name))
            del ready[name]
        backend, per_node = "nccl", min((offer.gpus for offer in ready.values()), default=0)
        findings += _idle_gpus(ready, per_node)
    else:
        backend, per_node = "gloo", 1
    if len(ready) * per_node < 2:
        left = f"only {', '.join(ready)} can take part" if ready else "no node can take part"
        reason = f"no collectives: {left}, and they need two {'GPUs' if backend == 'nccl' else 'ranks'}"
        findings.append(_missing(reason, "check at least two healthy nodes", None, required=required))
        return None, findings
    order = [nodes[name] for name in ready]
    first = ready[order[0].name]
    if not first.ports:
        action = "list its listeners: ss -ltn"
        return None, [*findings, error("no free port from 20000 to 29999", action=action, device=order[0].name)]
    expect = next(node.expect for node in fit if node.node == order[0].name)
    words = [
        *_SIZES[min(level, 3), backend], "--backend", backend, "--timeout", f"{min(60.0, total_s / 4):g}",
        "--start-timeout", f"{min(180.0, total_s / 2):g}", *_expectations(expect, backend, nodes=len(order)),
    ]  # fmt: skip
    master = meeting_point(order[0], first)
    return Plan(nodes=order, per_node=per_node, backend=backend, words=words, master=master), findings


def _idle_gpus(ready: Mapping[str, Capabilities], per_node: int) -> list[Finding]:
    """Errors for GPUs that take no part, at the nodes that have too few: the run is as wide as the smallest node."""
    most = max((offer.gpus for offer in ready.values()), default=0)
    idle = sum(offer.gpus - per_node for offer in ready.values())
    return [
        error(
            f"its torch sees {offer.gpus} GPUs and that of other nodes {most}: {idle} GPUs take no part",
            action="make all GPUs visible to its Python (CUDA_VISIBLE_DEVICES, the container), or check it separately",
            device=name,
        )
        for name, offer in ready.items()
        if offer.gpus < most
    ]


def _missing(reason: str, action: str, device: str | None, *, required: bool) -> Finding:
    return (
        error(reason, action=action, device=device)
        if required
        else skip(reason, proof="collectives are not required here", device=device)
    )


def _wants(node: NodeHealth) -> bool:
    stated = node.expect.get("collectives")
    return bool(stated) if stated is not None else _expects_gpus(node)


def _expects_gpus(node: NodeHealth) -> bool:
    return bool(node.expect.get("gpus")) or any(
        finding.values.get("listed")
        for result in node.results
        if result.check == "gpu_count"
        for finding in result.findings
    )


def expected_transport(expect: Mapping[str, Any], backend: str, *, nodes: int) -> str | None:
    """The stated transport, or that of the devices which the profile expects. RoCE is IB to NCCL."""
    if expect.get("transport") is not None:
        return str(expect["transport"])
    if backend != "nccl" or nodes < 2:
        return None
    return "EFA" if expect.get("efa_devices") else "IB" if expect.get("ib_ports") else None


def _expectations(expect: Mapping[str, Any], backend: str, *, nodes: int) -> list[str]:
    """Options for the transport and speed that the profile expects."""
    words = []
    transport = expected_transport(expect, backend, nodes=nodes)
    if transport is not None:
        words += ["--expect-transport", transport]
    if expect.get("busbw_gbps") is not None:
        words += ["--min-busbw", str(expect["busbw_gbps"])]
    return words


def keep_output(folder: Path, plan: Plan, outcomes: Sequence[Outcome]) -> None:
    """Write the output of every rank into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, outcome in enumerate(outcomes):
        if not isinstance(outcome, Sequence):
            continue
        for local, result in enumerate(outcome):
            name = f"rank-{number * plan.per_node + local}-{plan.nodes[number].name}"
            (folder / f"{name}.out").write_text(result.out, encoding="utf-8", errors="replace")
            (folder / f"{name}.err").write_text(result.err, encoding="utf-8", errors="replace")
