"""Pair test of two nodes: the measurement behind `trainmaster isolate`.

A pair is a run of its own, of two ranks with their rendezvous at the first node. The pairs of a round run at once; one
that hangs costs its own timeout and no other result. The caller brings the commands to the nodes (ssh, srun, a test).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

_SIZE = "64M"  # long enough for a link's bandwidth to show, short enough for a slow one to answer in time


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Command for one node."""

    node: str
    argv: tuple[str, ...]
    env: Mapping[str, str]


def plan_pair(
    a: str,
    b: str,
    *,
    address: str,
    port: int,
    size: str = _SIZE,
    timeout_s: float = 30.0,
    gpu: int = 0,
    backend: str | None = None,
) -> tuple[Command, Command]:
    """The commands of both nodes. `address` is where `b` reaches `a`; `gpu` chooses the rail."""
    argv = (
        "python3", "-m", "trainmaster.bench.collectives", "--collective", "sendrecv", "--min", size, "--max", size,
        "--timeout", str(timeout_s), *(("--backend", backend) if backend else ()),
    )  # fmt: skip
    common = {
        "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": address, "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": str(gpu),
    }  # fmt: skip
    first, second = (
        Command(node=node, argv=argv, env={**common, "RANK": str(rank), "GROUP_RANK": str(rank)})
        for rank, node in enumerate((a, b))
    )
    return first, second


def read_pair(output: str) -> float | None:
    """GB/s from the first node's output; None if the pair did not finish or its data was wrong."""
    for line in reversed(output.splitlines()):
        try:
            report = json.loads(line)["report"]
            rows = report["rows"]
            whole = len(rows) == 1 and not report["lost"] and not rows[0]["wrong"]
            return float(rows[0]["busbw_gbps"]) if whole else None
        except (ValueError, KeyError, TypeError):
            continue
    return None
