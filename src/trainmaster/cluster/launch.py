"""Programs that need each other on several nodes: started together, ended together, each with its output.

The first program decides: when it has ended, the others get a grace period and are then cut off, and the bootstrap on
each node ends what it started there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from trainmaster.cluster.exchange import HANDSHAKES, Program, ProgramResult, start
from trainmaster.cluster.kube_nodes import KubeNodes
from trainmaster.cluster.kube_programs import KubeLink
from trainmaster.cluster.nodes import Nodes
from trainmaster.cluster.slurm_nodes import SlurmNodes
from trainmaster.cluster.slurm_programs import SlurmLink
from trainmaster.core.errors import SpecError
from trainmaster.core.schema import build
from trainmaster.remote.package import Package, pack
from trainmaster.targets.ssh.channel import clean
from trainmaster.targets.ssh.connect import NodeUnavailable, load
from trainmaster.targets.ssh.hosts import SshHost, read_known_hosts

Outcome = Sequence[ProgramResult] | NodeUnavailable | None  # None: cut off after the first program had ended

_GRACE_S = 10.0  # a rank that knows the verdict ends within two seconds
CAPABILITIES_TIMEOUT_S = 120.0  # importing torch from a cold network file system takes a minute


class Link(Protocol):
    """Way to start programs on nodes."""

    async def start(self, host: SshHost, runs: Sequence[Program], *, timeout_s: float) -> Sequence[ProgramResult]:
        """Results of programs that run at once on a node; NodeUnavailable without its answer. Cancelling ends them."""
        ...

    def address(self, name: str) -> str | None:
        """Where other nodes reach this one; None: as its hosts file or it itself says."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SshLink:
    """A connection for each start; shared are keys, package and the number of concurrent handshakes."""

    known_hosts: bytes
    package: Package
    gate: asyncio.Semaphore

    async def start(self, host: SshHost, runs: Sequence[Program], *, timeout_s: float) -> Sequence[ProgramResult]:
        return await start(host, self.known_hosts, self.package, runs, timeout_s=timeout_s, gate=self.gate)

    def address(self, name: str) -> None:
        del name

    async def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a node offers a run, by its own report."""

    host: str  # its own name
    address: str | None
    ports: tuple[int, ...]
    torch: str | None
    gpus: int
    why: str  # reason that torch cannot be used


def open_link(hosts: Nodes, *, limit_s: float) -> Link:
    """The way to these nodes. `limit_s` bounds how long a scheduler keeps them for us; call `close`."""
    if isinstance(hosts, SlurmNodes):
        return SlurmLink(hosts, limit_s=limit_s)
    if isinstance(hosts, KubeNodes):
        return KubeLink(hosts, limit_s=limit_s)
    load()
    return SshLink(known_hosts=read_known_hosts(hosts.known_hosts), package=pack(), gate=asyncio.Semaphore(HANDSHAKES))


async def run_together(
    jobs: Sequence[tuple[SshHost, Sequence[Program]]], link: Link, *, timeout_s: float
) -> list[Outcome]:
    """Outcome of each node's programs, in the order of `jobs`."""
    tasks = [asyncio.create_task(_start(host, runs, link, timeout_s=timeout_s)) for host, runs in jobs]
    try:
        await asyncio.wait(tasks[:1])
        await asyncio.wait(tasks, timeout=_GRACE_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return [None if task.cancelled() else task.result() for task in tasks]


async def ask_capabilities(
    hosts: Sequence[SshHost], link: Link, *, ports: int = 1, timeout_s: float = CAPABILITIES_TIMEOUT_S
) -> dict[str, Capabilities | NodeUnavailable]:
    """Capabilities of every node, each asked alone."""
    program = Program(module="trainmaster.bench.collectives.capabilities", words=["--ports", str(ports)])
    answers = await asyncio.gather(*(_start(host, [program], link, timeout_s=timeout_s) for host in hosts))
    found = {host.name: _read_capabilities(answer) for host, answer in zip(hosts, answers, strict=True)}
    return {
        name: replace(one, address=link.address(name) or one.address) if isinstance(one, Capabilities) else one
        for name, one in found.items()
    }


def environment(
    *, rank: int, world: int, local_rank: int, local_world: int, node: int, nodes: int, master: tuple[str, int]
) -> Mapping[str, str]:
    """The rank environment in torchrun's variables."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world), "GROUP_RANK": str(node), "GROUP_WORLD_SIZE": str(nodes),
        "MASTER_ADDR": master[0], "MASTER_PORT": str(master[1]),
    }  # fmt: skip


def last_line(text: str) -> str:
    """The last line a program printed, for a sentence."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing"


async def _start(
    host: SshHost, runs: Sequence[Program], link: Link, *, timeout_s: float
) -> Sequence[ProgramResult] | NodeUnavailable:
    try:
        return await link.start(host, runs, timeout_s=timeout_s)
    except NodeUnavailable as wrong:
        return wrong
    except Exception as wrong:  # an internal error about one node must not hide the others
        return NodeUnavailable(f"internal error: {type(wrong).__name__}: {wrong}", action="report it as a bug")


def _read_capabilities(answer: Sequence[ProgramResult] | NodeUnavailable) -> Capabilities | NodeUnavailable:
    if isinstance(answer, NodeUnavailable):
        return answer
    (ran,) = answer
    with contextlib.suppress(ValueError, RecursionError, SpecError):
        return build(Capabilities, json.loads(clean(ran.out)))
    how = "was not done in time" if ran.code is None else f"ended with {ran.code}"
    reason = f"importing torch on it {how}: {last_line(ran.err)}"
    return NodeUnavailable(reason, action="run `python3 -c 'import torch'` on it by hand")
