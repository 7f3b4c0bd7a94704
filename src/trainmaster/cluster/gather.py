"""Checks on many nodes at once: each node alone, every answer kept, no node waits for another."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from trainmaster.checks import document
from trainmaster.cluster import compare, evidence
from trainmaster.cluster.exchange import HANDSHAKES, Answer, ask, write_files
from trainmaster.cluster.termination import run
from trainmaster.core.errors import SpecError
from trainmaster.core.health import ClusterHealth, NodeHealth, Silent
from trainmaster.core.results import Verdict
from trainmaster.remote.package import pack
from trainmaster.targets.ssh.connect import NodeUnavailable, load
from trainmaster.targets.ssh.hosts import SshHost, SshHosts, read_known_hosts

# Seconds for all checks of one node, by level: above the sum of the checks' own timeouts at that level.
TIMEOUT_S = {1: 180.0, 2: 1200.0, 3: 7200.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """The checks that every node runs, and by what they are judged."""

    level: int
    expect: Mapping[str, Any]
    planned: Sequence[str]
    version: str
    timeout_s: float
    profile: str | None = None  # as the user named it; None: each node detects its own

    def words(self, node: str) -> list[str]:
        only = [word for name in self.planned for word in ("--only", name)]
        return ["--level", str(self.level), "--node", node, "--expect-json", json.dumps(self.expect), *only]


@dataclass(slots=True, kw_only=True)
class TransferStats:
    """Bytes moved and seconds taken, by node."""

    sent_bytes: int = 0
    received_bytes: int = 0
    took_s: dict[str, float] = field(default_factory=dict)


Ask = Callable[[SshHost], Awaitable[Answer]]  # NodeUnavailable where a node gives no answer


def gather(
    hosts: SshHosts,
    request: CheckRequest,
    *,
    bundle: Path | None = None,
    on_answer: Callable[[str, str], None] | None = None,
    stats: TransferStats | None = None,
) -> ClusterHealth:
    """Health of every node, or the reason it is silent. A hung node costs its own timeout and no other node's time."""
    load()  # a missing package is reported once, not once per node
    known_hosts, package = read_known_hosts(hosts.known_hosts), pack()

    @contextlib.asynccontextmanager
    async def open_ssh() -> AsyncIterator[Ask]:
        gate = asyncio.Semaphore(HANDSHAKES)

        async def one(host: SshHost) -> Answer:
            words = request.words(host.name)
            return await ask(host, known_hosts, package, words, timeout_s=request.timeout_s, gate=gate)

        yield one

    return gather_by(open_ssh(), hosts.hosts, request, bundle=bundle, on_answer=on_answer, stats=stats)


def gather_by(
    opened: contextlib.AbstractAsyncContextManager[Ask],
    hosts: Sequence[SshHost],
    request: CheckRequest,
    *,
    bundle: Path | None,
    on_answer: Callable[[str, str], None] | None,
    stats: TransferStats | None,
) -> ClusterHealth:
    """The same by any way to ask a node."""
    cost = stats or TransferStats()

    async def one(host: SshHost, ask: Ask) -> NodeHealth | Silent:
        started = time.monotonic()
        try:
            answer = await ask(host)
            cost.sent_bytes += answer.sent_bytes
            cost.received_bytes += answer.received_bytes
            found = accept(host, answer, request, bundle)
        except NodeUnavailable as wrong:
            found = _silent(host, wrong.reason, wrong.action)
        except Exception as wrong:  # an internal error about one node must not hide the others
            found = _silent(host, f"internal error: {type(wrong).__name__}: {wrong}", "report it as a bug")
        cost.took_s[host.name] = round(time.monotonic() - started, 3)
        if isinstance(found, Silent):
            found = replace(found, took_s=cost.took_s[host.name])
        if on_answer is not None:
            on_answer(host.name, str(found.overall) if isinstance(found, NodeHealth) else "silent")
        return found

    async def ask_all() -> list[NodeHealth | Silent]:
        async with opened as ask:
            return await asyncio.gather(*(one(host, ask) for host in hosts))

    started_at, started = datetime.now().astimezone().isoformat(timespec="seconds"), time.monotonic()
    found = run(ask_all())
    nodes = tuple(item for item in found if isinstance(item, NodeHealth))
    return ClusterHealth(
        asked=tuple(host.name for host in hosts),
        nodes=nodes,
        silent=tuple(item for item in found if isinstance(item, Silent)),
        cluster=compare.compare(nodes) if len(hosts) > 1 else (),
        started_at=started_at,
        took_s=round(time.monotonic() - started, 3),
    )


def accept(host: SshHost, answer: Answer, request: CheckRequest, bundle: Path | None) -> NodeHealth | Silent:
    """The node's health if it ran exactly what was requested. A node does not choose its own plan."""
    again = "check it again; if it stays, remove ~/.cache/trainmaster on the node"
    try:
        health = document.parse(answer.health)
    except SpecError as wrong:
        return _silent(host, f"its answer cannot be parsed: {str(wrong)[:200]}", again)
    reported = [result.check for result in health.results]
    if len(set(reported)) != len(reported):
        return _silent(host, "its answer has several results of one check", again)
    if tuple(request.planned) != health.planned:
        reason = f"it planned {len(health.planned)} checks instead of the {len(request.planned)} requested"
        return _silent(host, reason, again)
    if (health.level, health.version) != (request.level, request.version):
        return _silent(host, f"it answered for level {health.level} of version {health.version[:20]}", again)
    if any(health.expect.get(name) != value for name, value in request.expect.items()):
        return _silent(host, "it judged by other expectations than the requested ones", again)
    if bundle is not None:
        try:
            write_files(evidence.capture_folder(bundle, host.name), answer.files)
        except (OSError, ValueError) as wrong:
            action = "check the free space of the --out folder, then the files that the node sends"
            return _silent(host, f"its capture cannot be written: {wrong}", action)
    return replace(health, node=host.name, profile=request.profile or health.profile)


def _silent(host: SshHost, reason: str, action: str) -> Silent:
    return Silent(node=host.name, verdict=Verdict.ERROR, reason=reason, action=action)
