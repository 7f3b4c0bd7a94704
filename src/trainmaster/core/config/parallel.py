"""Parallelism, memory and speed settings. None of them changes the result."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trainmaster.core.errors import Fault
from trainmaster.core.schema import field


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """FSDP over all ranks unless something else is written."""

    sharding: Literal["full", "hybrid"] = field(
        default="full", doc="full: one copy of the weights over all ranks; hybrid: one copy over each group of ranks"
    )
    shard_ranks: int | None = field(
        default=None, ge=1, doc="with hybrid, ranks that share one copy; not stated: those of one node"
    )
    recompute: Literal["none", "full", "layers", "ops"] = field(
        default="none",
        doc="activations computed again in the backward pass: of all blocks, of some, of cheap operations",
    )
    recompute_every: int = field(default=2, ge=1, doc="with layers, one block in this many")
    compile: Literal["auto", "on", "off"] = field(default="auto", doc="each block by torch.compile; auto: on a GPU")
    reduce: Literal["auto", "last", "each"] = field(
        default="auto",
        doc="gradients are summed over the ranks after the last micro-batch, or after each, which takes less memory; "
        "auto: last where they fit into a tenth of the GPU",
    )
    cpu_offload: bool = field(default=False, doc="weights and optimizer states live in host memory")
    float8: bool = field(default=False, doc="matrices of the blocks are multiplied in float8; GPUs from Hopper on")

    def faults(self) -> Iterator[Fault]:
        if self.sharding == "full" and self.shard_ranks is not None:
            yield Fault(path="shard_ranks", message="is for sharding: hybrid; write that too, or leave this out")

    def faults_on(self, ranks: int) -> Iterator[Fault]:
        """What is wrong with it on that many ranks."""
        if self.shard_ranks is not None and ranks % self.shard_ranks:
            near = largest_divisor(ranks, most=self.shard_ranks)
            message = f"{self.shard_ranks} does not divide {ranks} ranks; use {near}"
            yield Fault(path="shard_ranks", message=message)


def largest_divisor(number: int, *, most: int) -> int:
    """Largest divisor of `number` that is at most `most`, for advice; at a cost of the square root of the number."""
    if number <= most:
        return number
    largest = 1
    for small in range(1, math.isqrt(number) + 1):
        if number % small == 0:
            largest = max(largest, *(divisor for divisor in (small, number // small) if divisor <= most), 1)
    return largest
