"""Checks on many nodes at once: each node alone, every answer kept, no node waits for another."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from trainmaster.checks import document
from trainmaster.cluster.health import compare, evidence
from trainmaster.cluster.termination import run
from trainmaster.core.errors import NodeUnavailable, SpecError
from trainmaster.core.health import ClusterHealth, NodeHealth, Silent
from trainmaster.core.results import CheckResult, Finding, Verdict, error, fail, ok
from trainmaster.targets import Node, NodeAccess, Program, Result, Transfer

# Seconds for all checks of one node, by level: above the sum of the checks' own timeouts at that level.
TIMEOUT_S = {1: 180.0, 2: 1200.0, 3: 7200.0}
OFFER = "kubernetes_gpus"  # result about what the cluster lists
_COUNT = "gpu_count"
_VERDICTS = (0, 1, 3)  # exit codes of PASS or WARN, FAIL, INCOMPLETE


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """The checks that every node runs, and by what they are judged."""

    level: int
    expect: Mapping[str, Any]
    planned: Sequence[str]
    version: str
    timeout_s: float
    profile: str | None = None  # as the user named it; None: each node detects its own

    def program(self, node: str) -> Program:
        words = ["--level", str(self.level), "--node", node, "--expect-json", json.dumps(self.expect)]
        words += [word for name in self.planned for word in ("--only", name)]
        return Program(module="trainmaster.checks", words=[*words, "--json", "--progress"], captures=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer of a node: its health document as text, and its capture."""

    health: str
    files: Mapping[str, str]


@dataclass(slots=True, kw_only=True)
class Watch:
    """What is told while nodes are checked: the nodes before the first answer, each answer, and the bytes moved."""

    on_nodes: Callable[[Sequence[str]], None] = lambda _: None
    on_answer: Callable[[str, str], None] = lambda _name, _overall: None
    transfer: Transfer = field(default_factory=Transfer)


QueryNode = Callable[[Node], Awaitable[Answer]]  # NodeUnavailable where a node gives no answer


def gather(
    access: NodeAccess, request: CheckRequest, *, bundle: Path | None = None, watch: Watch | None = None
) -> ClusterHealth:
    """Health of every node, or the reason it is silent. A hung node costs its own timeout and no other node's time."""
    watcher = watch or Watch()

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[tuple[list[Node], QueryNode]]:
        async def query(node: Node) -> Answer:
            (result,) = await access.run(node, [request.program(node.name)], request.timeout_s)
            return read_answer(result)

        try:
            yield await access.nodes(), query
        finally:
            watcher.transfer.sent_bytes += access.transfer.sent_bytes
            watcher.transfer.received_bytes += access.transfer.received_bytes
            await access.close()

    return gather_by(opened(), request, bundle=bundle, watch=watcher)


def read_answer(result: Result) -> Answer:
    """The answer of the checks on a node; NodeUnavailable where they gave no verdict."""
    if result.code in _VERDICTS:
        return Answer(health=result.out, files=result.files)
    if result.code is not None:
        reason = f"the checks ended with {result.code}: {result.err[-400:]}"
        raise NodeUnavailable(reason[:600], action="run `trainmaster check` on it by hand")
    begun = [line[6:][:60] for line in result.err.splitlines() if line.startswith("check ")]
    where, only = (f"; it was in {begun[-1]}", f" --only {begun[-1]}") if begun else ("", "")
    raise NodeUnavailable(f"it was not done in time{where}", action=f"run `trainmaster check{only}` on it by hand")


def gather_by(
    opened: contextlib.AbstractAsyncContextManager[tuple[list[Node], QueryNode]],
    request: CheckRequest,
    *,
    bundle: Path | None,
    watch: Watch,
) -> ClusterHealth:
    """The same by any way to query a node."""

    async def query_node(node: Node, query: QueryNode) -> NodeHealth | Silent:
        started = time.monotonic()
        try:
            health = accept(node.name, await query(node), request, bundle)
        except NodeUnavailable as error:
            health = _silent(node.name, error.reason, error.action)
        except Exception as error:  # an internal error about one node must not hide the others
            health = _silent(node.name, f"internal error: {type(error).__name__}: {error}", "report it as a bug")
        if isinstance(health, Silent):
            health = replace(health, took_s=round(time.monotonic() - started, 3))
        watch.on_answer(node.name, str(health.overall) if isinstance(health, NodeHealth) else "silent")
        return health

    async def query_all() -> tuple[list[Node], list[NodeHealth | Silent]]:
        async with opened as (nodes, query):
            watch.on_nodes([node.name for node in nodes])
            return nodes, await asyncio.gather(*(query_node(node, query) for node in nodes))

    started_at, started = datetime.now().astimezone().isoformat(timespec="seconds"), time.monotonic()
    queried, answers = run(query_all())
    nodes = tuple(item for item in answers if isinstance(item, NodeHealth))
    return ClusterHealth(
        asked=tuple(node.name for node in queried),
        nodes=nodes,
        silent=tuple(item for item in answers if isinstance(item, Silent)),
        cluster=(*(compare.compare(nodes) if len(queried) > 1 else ()), *compare_offer(queried, nodes)),
        started_at=started_at,
        took_s=round(time.monotonic() - started, 3),
    )


def accept(name: str, answer: Answer, request: CheckRequest, bundle: Path | None) -> NodeHealth | Silent:
    """The node's health if it ran exactly what was requested. A node does not choose its own plan."""
    again = "check it again; if it stays, remove ~/.cache/trainmaster on the node"
    try:
        health = document.parse(answer.health)
    except SpecError as error:
        return _silent(name, f"its answer cannot be parsed: {str(error)[:200]}", again)
    reported = [result.check for result in health.results]
    if len(set(reported)) != len(reported):
        return _silent(name, "its answer has several results of one check", again)
    if tuple(request.planned) != health.planned:
        reason = f"it planned {len(health.planned)} checks instead of the {len(request.planned)} requested"
        return _silent(name, reason, again)
    if (health.level, health.version) != (request.level, request.version):
        return _silent(name, f"it answered for level {health.level} of version {health.version[:20]}", again)
    if any(health.expect.get(key) != value for key, value in request.expect.items()):
        return _silent(name, "it judged by other expectations than the requested ones", again)
    if bundle is not None:
        try:
            write_files(evidence.capture_folder(bundle, name), answer.files)
        except (OSError, ValueError) as error:
            action = "check the free space of the --out folder, then the files that the node sends"
            return _silent(name, f"its capture cannot be written: {error}", action)
    return replace(health, node=name, profile=request.profile or health.profile)


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write a capture into a new folder."""
    folder.mkdir(parents=True)
    for name, text in files.items():
        path = folder / PurePosixPath(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8", errors="replace"))


def _silent(name: str, reason: str, action: str) -> Silent:
    return Silent(node=name, verdict=Verdict.ERROR, reason=reason, action=action)


def compare_offer(offered: Sequence[Node], nodes: Sequence[NodeHealth]) -> tuple[CheckResult, ...]:
    """GPUs that the cluster lists and that the nodes did not find. Nothing where GPUs were not counted. Pure."""
    findings: list[Finding] = []
    counts = {
        node.node: [finding for result in node.results if result.check == _COUNT for finding in result.findings]
        for node in nodes
    }
    compared = [node for node in offered if node.installed and counts.get(node.name)]
    for node in compared:
        if node.gpus is not None and node.installed is not None and node.gpus < node.installed:
            reason = f"{node.gpus} of its {node.installed} GPUs are in working order, by the device plugin"
            findings.append(fail(reason, action="see the device plugin's log on it", device=node.name))
        elif all(finding.verdict is Verdict.SKIP for finding in counts[node.name]):
            reason = f"the cluster lists {node.installed} GPUs of it, and its pod found none"
            findings.append(error(reason, action="is the NVIDIA runtime set up in its containerd?", device=node.name))
    if compared and not findings:
        findings.append(ok("every pod found GPUs where the cluster lists them"))
    return (CheckResult.of(OFFER, findings),) if findings else ()
