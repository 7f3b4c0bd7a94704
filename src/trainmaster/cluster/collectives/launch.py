"""Programs that need each other on several nodes: started together, ended together, each with its output.

The first program decides: when it has ended, the others get a grace period and are then cut off, and the bootstrap on
each node ends what it started there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainmaster.core.clean_text import clean
from trainmaster.core.errors import NodeUnavailable, SpecError
from trainmaster.core.schema import build
from trainmaster.node.node_name import NODE_NAME_VARIABLE
from trainmaster.targets import Node, NodeAccess, Program, Result

Outcome = Sequence[Result] | NodeUnavailable | None  # None: cut off after the first program had ended

_GRACE_S = 10.0  # a rank that knows the verdict ends within two seconds
CAPABILITIES_TIMEOUT_S = 120.0  # importing torch from a cold network file system takes a minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a node offers a run, by its own report."""

    host: str  # its own name
    address: str | None
    ports: tuple[int, ...]
    torch: str | None
    gpus: int
    why: str  # reason that torch cannot be used
    devices: int = 0  # GPUs that its driver or PCI bus lists

    def find_fault(self, backend: str | None) -> tuple[str, str] | None:
        """Reason and action where the node should have GPUs and its torch sees none; `gloo` was asked for as it is."""
        if self.torch is None or self.gpus or backend == "gloo" or not (self.devices or backend == "nccl"):
            return None
        listed = f"though the node has {self.devices}" if self.devices else "and the node lists none"
        return f"its torch sees no GPU, {listed}", "install torch with CUDA on it; for a trial on CPUs: --backend gloo"


async def run_together(
    jobs: Sequence[tuple[Node, Sequence[Program]]], access: NodeAccess, *, timeout_s: float
) -> list[Outcome]:
    """Outcome of each node's programs, in the order of `jobs`."""
    tasks = [asyncio.create_task(_run(node, programs, access, timeout_s=timeout_s)) for node, programs in jobs]
    try:
        await asyncio.wait(tasks[:1])
        await asyncio.wait(tasks, timeout=_GRACE_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return [None if task.cancelled() else task.result() for task in tasks]


async def query_capabilities(
    nodes: Sequence[Node], access: NodeAccess, *, ports: int = 1, timeout_s: float = CAPABILITIES_TIMEOUT_S
) -> dict[str, Capabilities | NodeUnavailable]:
    """Capabilities of every node, each asked alone."""
    program = Program(module="trainmaster.bench.collectives.capabilities", words=["--ports", str(ports)])
    answers = await asyncio.gather(*(_run(node, [program], access, timeout_s=timeout_s) for node in nodes))
    return {node.name: _read_capabilities(answer) for node, answer in zip(nodes, answers, strict=True)}


def meeting_point(node: Node, offer: Capabilities) -> tuple[str, int]:
    """Address and port where the ranks meet: those of the first node. Its target may state the address; else it is the
    one that the node was reached by, which its neighbours normally reach too."""
    return node.address or offer.address or node.name, offer.ports[0]


def environment(
    *,
    rank: int,
    world: int,
    local_rank: int,
    local_world: int,
    node: int,
    nodes: int,
    master: tuple[str, int],
    name: str,
) -> Mapping[str, str]:
    """The rank environment in torchrun's variables, with the node's name in the list of hosts."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world), "GROUP_RANK": str(node), "GROUP_WORLD_SIZE": str(nodes),
        "MASTER_ADDR": master[0], "MASTER_PORT": str(master[1]),
        NODE_NAME_VARIABLE: name,
    }  # fmt: skip


def last_line(text: str) -> str:
    """The last line a program printed, for a sentence."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing"


async def _run(
    node: Node, programs: Sequence[Program], access: NodeAccess, *, timeout_s: float
) -> Sequence[Result] | NodeUnavailable:
    try:
        return await access.run(node, programs, timeout_s)
    except NodeUnavailable as error:
        return error
    except Exception as error:  # an internal error about one node must not hide the others
        return NodeUnavailable(f"internal error: {type(error).__name__}: {error}", action="report it as a bug")


def _read_capabilities(answer: Sequence[Result] | NodeUnavailable) -> Capabilities | NodeUnavailable:
    if isinstance(answer, NodeUnavailable):
        return answer
    (result,) = answer
    with contextlib.suppress(ValueError, RecursionError, SpecError):
        return build(Capabilities, json.loads(clean(result.out)))
    how = "was not done in time" if result.code is None else f"ended with {result.code}"
    reason = f"importing torch on it {how}: {last_line(result.err)}"
    return NodeUnavailable(reason, action="run `python3 -c 'import torch'` on it by hand")
