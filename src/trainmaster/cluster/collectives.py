"""Collectives across the nodes of a cluster, after each was asked alone: who takes part, what runs, what it means.

Only nodes that answered and whose GPUs are sound take part, because one that cannot come keeps all others waiting. Who
was left out is told with its reason. Rank 0 judges the run (bench/collectives); where it cannot, each node's own word
on its ranks says who stopped.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainmaster.core.errors import SpecError
from trainmaster.core.health import ClusterHealth, NodeHealth
from trainmaster.core.results import CheckResult, Finding, Verdict, error, fail, skip, warn

if TYPE_CHECKING:
    from trainmaster.bench.collectives import Report, Row
    from trainmaster.cluster.exchange import Ran, Run
    from trainmaster.cluster.hosts import SshHost, SshHosts
    from trainmaster.cluster.launch import Outcome, Seat
    from trainmaster.cluster.ssh import CannotAsk

NAME = "collectives"
LEVEL = 2
TIMEOUT_S = {2: 600.0, 3: 3600.0}  # of the whole run, where the user states none

# Level 2: the sizes for which figures of all_reduce are published, on NCCL; on gloo three that show latency and rate.
# Level 3: every collective at every size.
_SIZES = {
    (2, "nccl"): ("--collective", "all_reduce", "--min", "128M", "--max", "16G"),
    (2, "gloo"): ("--collective", "all_reduce", "--min", "64K", "--max", "16M", "--factor", "16"),
    (3, "nccl"): ("--collective", "all"),
    (3, "gloo"): ("--collective", "all"),
}
# Checks that speak of a GPU itself. One that fails is reason enough: the run would measure the sick GPU, or hang on it.
_OF_GPUS = frozenset(
    "burn corruption cuda_init dcgm dcgm_stress gemm hbm memory_pattern memory_whole p2p pcie_copy xid".split()
)
_MUST_ANSWER = frozenset({"cuda_init", "gpu_count", "gpu_driver"})  # without their answer nobody knows that a GPU works
_ABORT = -6  # a rank ends so because another one left


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run: the nodes in the order of their ranks, and what each starts."""

    hosts: Sequence[SshHost]
    per_node: int
    backend: str
    words: Sequence[str]
    master: tuple[str, int]

    @property
    def world(self) -> int:
        return len(self.hosts) * self.per_node

    def node_of(self, rank: int) -> str:
        return self.hosts[rank // self.per_node].name

    def runs(self, node: int) -> list[Run]:
        from trainmaster.cluster.exchange import Run
        from trainmaster.cluster.launch import environment

        return [
            Run(
                module="trainmaster.bench.collectives",
                words=self.words,
                env=environment(
                    rank=node * self.per_node + local, world=self.world, local_rank=local, local_world=self.per_node,
                    node=node, nodes=len(self.hosts), master=self.master,
                ),
            )
            for local in range(self.per_node)
        ]  # fmt: skip


def measure(
    health: ClusterHealth, hosts: SshHosts, *, level: int, timeout_s: float | None, bundle: Path | None = None
) -> CheckResult:
    """The result of the cluster's collectives. Whatever happens, it says something: planned is reported."""
    from trainmaster.checks.document import clean

    started = time.monotonic()
    total_s = timeout_s or TIMEOUT_S[level]
    findings = asyncio.run(_measure(health, hosts, level=level, total_s=total_s, bundle=bundle))
    took_s = round(time.monotonic() - started, 3)
    return clean([CheckResult(check=NAME, findings=tuple(findings), took_s=took_s)])[0]


async def _measure(
    health: ClusterHealth, hosts: SshHosts, *, level: int, total_s: float, bundle: Path | None
) -> list[Finding]:
    from trainmaster.cluster import launch

    fit, left_out = choose(health)
    by_name = {host.name: host for host in hosts.hosts}
    # One node is worth asking too: its GPUs may talk to each other.
    seats: dict[str, Seat | CannotAsk] = {}
    if fit:
        link = launch.open_link(hosts)
        seats = await launch.ask_seats(
            [by_name[node.node] for node in fit], link, timeout_s=min(total_s, launch.SEATS_S)
        )
    planned, more = plan(fit, seats, by_name, level=level, total_s=total_s)
    if planned is None:
        return [*left_out, *more]
    jobs = [(host, planned.runs(number)) for number, host in enumerate(planned.hosts)]
    outcomes = await launch.run_together(jobs, link, timeout_s=total_s)
    if bundle is not None:
        _keep(bundle / NAME, planned, outcomes)
    return [*judge(planned, outcomes, left_out=[f.device or "" for f in (*left_out, *more)]), *left_out, *more]


def choose(health: ClusterHealth) -> tuple[list[NodeHealth], list[Finding]]:
    """Nodes that may take part; and who may not, with the reason. Those have a bad verdict of their own already."""
    fit: list[NodeHealth] = []
    out = [skip(f"left out of the collectives: it is silent ({one.reason})", device=one.node) for one in health.silent]
    for node in health.nodes:
        sick = [
            result
            for result in node.results
            if (result.check.startswith("gpu_") or result.check in _OF_GPUS)
            and (result.verdict is Verdict.FAIL or (result.verdict is Verdict.ERROR and result.check in _MUST_ANSWER))
        ]
        if sick:
            names = ", ".join(f"{result.check} ({result.verdict})" for result in sick)
            out.append(skip(f"left out of the collectives: {names}", device=node.node))
        else:
            fit.append(node)
    return fit, out


def plan(
    fit: Sequence[NodeHealth],
    seats: Mapping[str, Seat | CannotAsk],
    hosts: Mapping[str, SshHost],
    *,
    level: int,
    total_s: float,
) -> tuple[Plan | None, list[Finding]]:
    """The run that these nodes can do together, if any; and what is to be said of those that cannot."""
    from trainmaster.cluster.launch import Seat

    found: list[Finding] = []
    ready: dict[str, Seat] = {}
    required = any(_wants(node) for node in fit)
    for node in fit:
        seat = seats[node.node]
        if not isinstance(seat, Seat):
            reason = f"it answered its checks, and not the collectives: {seat.reason}"
            found.append(error(reason, action=seat.action, device=node.node))
        elif seat.torch is None:
            reason = f"{seat.why} on {node.node}, so it takes no part in the collectives"
            found.append(_missing(reason, "install torch for its Python", node.node, required=required))
        else:
            ready[node.node] = seat
    gpus = {name: seat.gpus for name, seat in ready.items()}
    if any(gpus.values()) or any(_expects_gpus(node) for node in fit):
        for name in [name for name, count in gpus.items() if not count]:
            reason = "its torch sees no GPU, and the others' or the profile has some"
            found.append(error(reason, action="install a torch with CUDA there, or leave it out", device=name))
            del ready[name]
        backend, per_node = "nccl", min((seat.gpus for seat in ready.values()), default=0)
    else:
        backend, per_node = "gloo", 1
    if len(ready) * per_node < 2:
        who = f"{', '.join(ready)} alone has" if ready else "no node is left that has"
        reason = f"no collectives: {who} {'a GPU' if backend == 'nccl' else 'a rank'} to talk to another"
        found.append(_missing(reason, "check two nodes or more that are sound", None, required=required))
        return None, found
    order = [hosts[name] for name in ready]
    first = ready[order[0].name]
    if not first.ports:
        action = "see what listens on it: ss -ltn"
        return None, [*found, error("no port from 20000 to 29999 is free", action=action, device=order[0].name)]
    expect = next(node.expect for node in fit if node.node == order[0].name)
    words = [
        *_SIZES[min(level, 3), backend], "--backend", backend, "--timeout", f"{min(60.0, total_s / 4):g}",
        "--start-timeout", f"{min(180.0, total_s / 2):g}", *_expectations(expect, backend, nodes=len(order)),
    ]  # fmt: skip
    # Where SSH reached it is one of its own addresses, and by all experience one that its neighbours reach too.
    address = order[0].address or first.address or order[0].host
    made = Plan(hosts=order, per_node=per_node, backend=backend, words=words, master=(address, first.ports[0]))
    return made, found


def _missing(reason: str, action: str, device: str | None, *, required: bool) -> Finding:
    return error(reason, action=action, device=device) if required else skip(reason, device=device)


def _wants(node: NodeHealth) -> bool:
    stated = node.expect.get("collectives")
    return bool(stated) if stated is not None else _expects_gpus(node)


def _expects_gpus(node: NodeHealth) -> bool:
    return bool(node.expect.get("gpus"))


def _expectations(expect: Mapping[str, Any], backend: str, *, nodes: int) -> list[str]:
    """What the profile says of transport and speed. RoCE is IB to NCCL."""
    words = []
    transport = expect.get("transport")
    if transport is None and backend == "nccl" and nodes > 1:
        transport = "EFA" if expect.get("efa_devices") else "IB" if expect.get("ib_ports") else None
    if transport is not None:
        words += ["--expect-transport", str(transport)]
    if expect.get("busbw_gbps") is not None:
        words += ["--min-busbw", str(expect["busbw_gbps"])]
    return words


# --- what it means --------------------------------------------------------------------------------------------------


def judge(plan: Plan, outcomes: Sequence[Outcome], *, left_out: Sequence[str] = ()) -> list[Finding]:
    """The findings of a run, from rank 0's report and from what each node says of its own ranks."""
    ranks = _evidence(plan, outcomes)
    first = outcomes[0]
    report, rows = read(first[0].out) if isinstance(first, Sequence) else (None, [])
    if report is None:
        return [*_blame(plan, outcomes, ranks), *_curves(plan, rows)]
    by_check = {result.check: result.findings for result in report.results}
    values = {"nodes": [host.name for host in plan.hosts], "ranks": plan.world, "backend": plan.backend}
    found: list[Finding] = []
    if report.lost:
        for lost, finding in zip(report.lost, by_check.get("collective_ranks", ()), strict=False):
            node = plan.node_of(lost.rank) if lost.rank is not None and lost.rank < plan.world else None
            told = ranks.get(lost.rank) if lost.rank is not None else None
            found.append(_at(finding, node, lost.host, told))
    else:
        without = f"; without {', '.join(left_out)}" if left_out else ""
        for finding in by_check.get("collective_ranks", ()):
            found.append(replace(finding, reason=finding.reason + without, values={**finding.values, **values}))
    for finding in by_check.get("collective_data", ()):
        rank = finding.values.get("rank")
        known = isinstance(rank, int) and 0 <= rank < plan.world
        found.append(
            _at(finding, plan.node_of(rank) if known and isinstance(rank, int) else None, finding.device, None)
        )
    found += by_check.get("collective_transport", ())
    found += _speed(plan, report, by_check.get("collective_bandwidth", ()))
    if missing := [name for name in _CHECKS if not by_check.get(name)]:
        found.append(error(f"the report of rank 0 says nothing of {', '.join(missing)}", action="run it again"))
    return found


_CHECKS = ("collective_ranks", "collective_data", "collective_transport", "collective_bandwidth")


def read(output: str) -> tuple[Report | None, list[Row]]:
    """The report that rank 0 printed, if it came so far; else the rows it had until then."""
    from trainmaster.bench.collectives import Report, Row
    from trainmaster.core.schema import build

    rows: list[Row] = []
    for line in output.splitlines():
        try:
            told = json.loads(line)
            if "row" in told:
                rows.append(build(Row, told["row"]))
            else:
                plain = told["report"]
                return build(Report, {k: v for k, v in plain.items() if k not in ("overall", "exit_code")}), rows
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SpecError):
            continue  # a library's noise, or half a line
    return None, rows


def _at(finding: Finding, node: str | None, host: str | None, evidence: str | None) -> Finding:
    """A finding about a rank, in the names of the hosts file: a machine's own name may be another."""
    if node is None:
        return replace(finding, device=None)
    reason, action = finding.reason, finding.action
    if host and host != node:
        reason, action = reason.replace(f"on {host}", f"on {node}"), action and action.replace(host, node)
    told = f"; its node says: {evidence}" if evidence else ""
    return replace(finding, device=node, reason=reason + told, action=action)


def _speed(plan: Plan, report: Report, judged: Sequence[Finding]) -> Iterator[Finding]:
    """Each collective's curve with its judgement. Measured and not judged is a warning on GPUs, as for every speed."""
    for finding in judged:
        name = finding.values.get("collective")
        if name is None:
            if finding.verdict is not Verdict.ERROR or not report.rows:
                yield finding
            continue  # "measured, not judged": said of each collective below
        rows = [row for row in report.rows if row.collective == name]
        values = {**finding.values, **_values(plan, rows, report.transport)}
        if finding.verdict is Verdict.SKIP and plan.backend == "nccl":
            action = "state what it should reach: --expect busbw_gbps=N"
            yield warn(finding.reason.replace("; --min-busbw sets your own", ""), action=action, **values)
        else:
            yield replace(finding, values=values, reason=finding.reason.replace("--min-busbw", "--expect busbw_gbps=N"))


def _curves(plan: Plan, rows: Sequence[Row]) -> Iterator[Finding]:
    """What was measured before the run broke. It is kept and not judged."""
    for name in dict.fromkeys(row.collective for row in rows):
        of = [row for row in rows if row.collective == name]
        reason = f"{name}: {len(of)} sizes were measured before the run broke, and not judged"
        yield skip(reason, collective=name, **_values(plan, of, ""))


def _values(plan: Plan, rows: Sequence[Row], transport: str) -> dict[str, Any]:
    """As the report draws curves (report/health/curves.py)."""
    return {
        "ranks": plan.world,
        "node_count": len(plan.hosts),
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
    """By rank, what its own node says of it, where that explains a loss."""
    found: dict[int, str] = {}
    for number, outcome in enumerate(outcomes):
        if outcome is None:
            continue
        for local in range(plan.per_node):
            if not isinstance(outcome, Sequence):
                words: str | None = outcome.reason
            else:
                words = _end_of(outcome[local])
            if words is not None:
                found[number * plan.per_node + local] = words
    return found


def _end_of(ran: Ran) -> str | None:
    if ran.code is None:
        if ran.state in ("T", "t"):
            return "its process is stopped (SIGSTOP, or a debugger holds it)"
        return None  # still at work: it waits, as all the others do
    if ran.code < 0 and ran.code != _ABORT:
        return f"its process was killed by signal {-ran.code}"
    return None


def _blame(plan: Plan, outcomes: Sequence[Outcome], evidence: Mapping[int, str]) -> list[Finding]:
    """Rank 0 gave no report. Who is gone or stopped is named; else what rank 0 said, and nobody is blamed."""
    nodes: dict[str, str] = {}
    for rank, words in evidence.items():
        nodes.setdefault(plan.node_of(rank), f"rank {rank} on {plan.node_of(rank)}: {words}")
    if nodes:
        return [
            fail(
                f"{reason}; the collectives of {plan.world} ranks came to no end",
                action=f"run `trainmaster check --level 2` on {node} alone, then all together again", device=node,
            )
            for node, reason in nodes.items()
        ]  # fmt: skip
    first = outcomes[0]
    said = _last_words(first[0]) if isinstance(first, Sequence) else "nothing"
    bad = [
        f"rank {number * plan.per_node + local} on {plan.hosts[number].name}: {_last_words(ran)}"
        for number, outcome in enumerate(outcomes)
        if isinstance(outcome, Sequence)
        for local, ran in enumerate(outcome)
        if ran.code not in (0, None) and (number or local)
    ]
    others = f"; {'; '.join(bad[:3])}" if bad else ""
    reason = f"{plan.world} ranks on {len(plan.hosts)} nodes gave no report; rank 0 said: {said}{others}"
    action = f"see that every node reaches {plan.master[0]} (or state its `address` in the hosts file), then run again"
    return [error(reason, action=action)]


def _last_words(ran: Ran) -> str:
    from trainmaster.cluster.launch import last_words

    how = "still at work at the deadline" if ran.code is None else f"ended with {ran.code}"
    return f"{last_words(ran.err)} ({how})"


def _keep(folder: Path, plan: Plan, outcomes: Sequence[Outcome]) -> None:
    """Every rank's words, for whoever wants to look again."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, outcome in enumerate(outcomes):
        if not isinstance(outcome, Sequence):
            continue
        for local, ran in enumerate(outcome):
            name = f"rank-{number * plan.per_node + local}-{plan.hosts[number].name}"
            (folder / f"{name}.out").write_text(ran.out, encoding="utf-8", errors="replace")
            (folder / f"{name}.err").write_text(ran.err, encoding="utf-8", errors="replace")


def summary(result: CheckResult) -> str:
    """One line for the terminal."""
    good = next((finding.reason for finding in result.findings if finding.verdict is Verdict.PASS), None)
    return f"collectives: {good or result.verdict} in {result.took_s:.1f} s"
