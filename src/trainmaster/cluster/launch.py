"""Programs on several nodes that need each other: started at once, ended together, each with what it said.

The first one decides: when it has ended, those that are still at work are given a moment and then cut off, and the half
of ours on each node ends what it started there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainmaster.core.errors import SpecError
from trainmaster.core.schema import build

if TYPE_CHECKING:
    from trainmaster.cluster.exchange import Package, Ran, Run
    from trainmaster.cluster.hosts import SshHost, SshHosts
    from trainmaster.cluster.ssh import CannotAsk

    Outcome = Sequence[Ran] | CannotAsk | None  # None: cut off, as the first one had ended

_GRACE_S = 10.0  # a rank that was told the verdict is gone in two seconds
SEATS_S = 120.0  # to import torch: a cold network file system takes a minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What every exchange with a node needs."""

    known_hosts: bytes
    package: Package
    gate: asyncio.Semaphore


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What a node offers a run, as it says itself."""

    host: str  # its own name
    address: str | None
    ports: tuple[int, ...]
    torch: str | None
    gpus: int
    why: str  # torch cannot be used


def open_link(hosts: SshHosts) -> Link:
    from trainmaster.cluster.exchange import HANDSHAKES, pack
    from trainmaster.cluster.hosts import read_known_hosts
    from trainmaster.cluster.ssh import load

    load()
    return Link(known_hosts=read_known_hosts(hosts.known_hosts), package=pack(), gate=asyncio.Semaphore(HANDSHAKES))


async def run_together(jobs: Sequence[tuple[SshHost, Sequence[Run]]], link: Link, *, timeout_s: float) -> list[Outcome]:
    """What became of each node's programs, in the order of `jobs`."""
    tasks = [asyncio.create_task(_start(host, runs, link, timeout_s=timeout_s)) for host, runs in jobs]
    try:
        await asyncio.wait(tasks[:1])
        await asyncio.wait(tasks, timeout=_GRACE_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return [None if task.cancelled() else task.result() for task in tasks]


async def ask_seats(
    hosts: Sequence[SshHost], link: Link, *, ports: int = 1, timeout_s: float = SEATS_S
) -> dict[str, Seat | CannotAsk]:
    """Every node's seats, each asked alone."""
    from trainmaster.cluster.exchange import Run

    run = Run(module="trainmaster.bench.collectives.capabilities", words=["--ports", str(ports)])
    told = await asyncio.gather(*(_start(host, [run], link, timeout_s=timeout_s) for host in hosts))
    return {host.name: _seat(found) for host, found in zip(hosts, told, strict=True)}


def environment(
    *, rank: int, world: int, local_rank: int, local_world: int, node: int, nodes: int, master: tuple[str, int]
) -> Mapping[str, str]:
    """A rank's place, as torchrun tells it."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world), "GROUP_RANK": str(node), "GROUP_WORLD_SIZE": str(nodes),
        "MASTER_ADDR": master[0], "MASTER_PORT": str(master[1]),
    }  # fmt: skip


def last_words(text: str) -> str:
    """The last line a program printed, for a sentence."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing"


async def _start(host: SshHost, runs: Sequence[Run], link: Link, *, timeout_s: float) -> Sequence[Ran] | CannotAsk:
    from trainmaster.cluster.exchange import start
    from trainmaster.cluster.ssh import CannotAsk

    try:
        return await start(host, link.known_hosts, link.package, runs, timeout_s=timeout_s, gate=link.gate)
    except CannotAsk as wrong:
        return wrong
    except Exception as wrong:  # our own mistake about one node must not hide the others
        return CannotAsk(f"asking it failed: {type(wrong).__name__}: {wrong}", action="report this; it is our mistake")


def _seat(told: Sequence[Ran] | CannotAsk) -> Seat | CannotAsk:
    from trainmaster.cluster.exchange import clean
    from trainmaster.cluster.ssh import CannotAsk

    if isinstance(told, CannotAsk):
        return told
    (ran,) = told
    with contextlib.suppress(ValueError, RecursionError, SpecError):
        return build(Seat, json.loads(clean(ran.out)))
    how = "was not done in time" if ran.code is None else f"ended with {ran.code}"
    return CannotAsk(
        f"asking its torch {how}: {last_words(ran.err)}", action="run `python3 -c 'import torch'` on it by hand"
    )
