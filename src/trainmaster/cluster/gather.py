"""Many nodes at once: ask every one alone, keep what each says, and let none wait for another."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainmaster.core.errors import SpecError, UsageError
from trainmaster.core.health import ClusterHealth, NodeHealth, Silent
from trainmaster.core.results import Verdict

if TYPE_CHECKING:
    from trainmaster.cluster.exchange import Answer, Package
    from trainmaster.cluster.hosts import SshHost, SshHosts

# A whole node's checks by level, in seconds: above what the checks of that level may take one after the other.
TIMEOUT_S = {1: 180.0, 2: 1200.0, 3: 7200.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What every node is asked to do."""

    level: int
    expect: Mapping[str, Any]
    planned: Sequence[str]
    version: str
    timeout_s: float
    profile: str | None = None  # as it was named; None: each node finds out for itself

    def words(self, node: str) -> list[str]:
        only = [word for name in self.planned for word in ("--only", name)]
        return ["--level", str(self.level), "--node", node, "--expect-json", json.dumps(self.expect), *only]


@dataclass(slots=True, kw_only=True)
class Figures:
    """What the asking cost."""

    sent_bytes: int = 0
    received_bytes: int = 0
    took_s: dict[str, float] = field(default_factory=dict)


def load_hosts(word: str) -> SshHosts:
    """The nodes that `--on ssh:FILE` names."""
    from trainmaster.cli import _yaml_file
    from trainmaster.cluster.hosts import parse_hosts

    kind, _, options = word.partition(":")
    if kind != "ssh" or not options:
        raise UsageError(f"--on {word}: write ssh:hosts.yaml; other targets are not asked for their health yet")
    path = Path(options)
    return _yaml_file.load(path).read(lambda document: parse_hosts(document, path.parent))


def gather(
    hosts: SshHosts,
    order: Order,
    *,
    bundle: Path | None = None,
    on_answer: Callable[[str, str], None] | None = None,
    figures: Figures | None = None,
) -> ClusterHealth:
    """Every node's health, or why it is silent. A node that hangs costs its timeout and nobody else's time."""
    from trainmaster.cluster import compare
    from trainmaster.cluster.exchange import HANDSHAKES, ask, pack
    from trainmaster.cluster.hosts import read_known_hosts
    from trainmaster.cluster.ssh import CannotAsk, load

    load()  # a missing package is said once, not once per node
    known_hosts, package = read_known_hosts(hosts.known_hosts), pack()
    cost = figures or Figures()

    async def one(host: SshHost, package: Package, gate: asyncio.Semaphore) -> NodeHealth | Silent:
        started = time.monotonic()
        try:
            answer = await ask(host, known_hosts, package, order.words(host.name), timeout_s=order.timeout_s, gate=gate)
            cost.sent_bytes += answer.sent_bytes
            cost.received_bytes += answer.received_bytes
            found: NodeHealth | Silent = _believe(host, answer, order, bundle)
        except CannotAsk as wrong:
            found = _silent(host, wrong.reason, wrong.action)
        except Exception as wrong:  # our own mistake about one node must not hide the others
            found = _silent(
                host, f"asking it failed: {type(wrong).__name__}: {wrong}", "report this; it is our mistake"
            )
        cost.took_s[host.name] = round(time.monotonic() - started, 3)
        if isinstance(found, Silent):
            found = replace(found, took_s=cost.took_s[host.name])
        if on_answer is not None:
            on_answer(host.name, str(found.overall) if isinstance(found, NodeHealth) else "silent")
        return found

    async def all_of_them() -> list[NodeHealth | Silent]:
        gate = asyncio.Semaphore(HANDSHAKES)
        return await asyncio.gather(*(one(host, package, gate) for host in hosts.hosts))

    started_at, started = datetime.now().astimezone().isoformat(timespec="seconds"), time.monotonic()
    found = asyncio.run(all_of_them())
    nodes = tuple(item for item in found if isinstance(item, NodeHealth))
    return ClusterHealth(
        asked=tuple(host.name for host in hosts.hosts),
        nodes=nodes,
        silent=tuple(item for item in found if isinstance(item, Silent)),
        cluster=compare.compare(nodes) if len(hosts.hosts) > 1 else (),
        started_at=started_at,
        took_s=round(time.monotonic() - started, 3),
    )


def _believe(host: SshHost, answer: Answer, order: Order, bundle: Path | None) -> NodeHealth | Silent:
    """The node's health if it did what was asked, all of it; a node does not decide what was planned for it."""
    from trainmaster.checks import document
    from trainmaster.cluster import evidence
    from trainmaster.cluster.exchange import write_files

    again = "check it again; if it stays, remove ~/.cache/trainmaster there"
    try:
        health = document.parse(answer.health)
    except SpecError as wrong:
        return _silent(host, f"it answered rubbish: {str(wrong)[:200]}", again)
    reported = [result.check for result in health.results]
    if tuple(order.planned) != health.planned or len(set(reported)) != len(reported):
        return _silent(host, f"it planned {len(health.planned)} checks, not the {len(order.planned)} asked for", again)
    if (health.level, health.version) != (order.level, order.version):
        return _silent(host, f"it answered for level {health.level} of version {health.version[:20]}", again)
    if any(health.expect.get(name) != value for name, value in order.expect.items()):
        return _silent(host, "it judged by another expectation than the one it was given", again)
    if bundle is not None:
        try:
            write_files(evidence.capture_folder(bundle, host.name), answer.files)
        except (OSError, ValueError) as wrong:
            return _silent(host, f"its capture cannot be kept: {wrong}", "look at the disk here, then at what it sends")
    return replace(health, node=host.name, profile=order.profile or health.profile)


def _silent(host: SshHost, reason: str, action: str) -> Silent:
    return Silent(node=host.name, verdict=Verdict.ERROR, reason=reason, action=action)
