"""The collectives: input, call, and expected output of each."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from trainmaster.bench.collectives import pattern
from trainmaster.bench.collectives.pattern import Line
from trainmaster.bench.collectives.sweep import ELEMENT_BYTES

ROOT = 0  # of broadcast, as in nccl-tests


class Operation:
    """One collective at one size, over buffers that are large enough for every size."""

    def __init__(self, name: str, size_bytes: int, *, rank: int, world: int, send: Tensor, recv: Tensor) -> None:
        self.name, self.rank, self.world = name, rank, world
        # The same number of elements for every rank; nccl-tests rounds down likewise.
        self.block = max(size_bytes // ELEMENT_BYTES // world, 1)
        whole = self.block * world
        first = self.block if name == "all_gather" else whole
        second = self.block if name == "reduce_scatter" else whole
        self.send, self.recv = send[:first], recv[:second]

    @property
    def bytes(self) -> int:
        return self.block * self.world * ELEMENT_BYTES

    @property
    def result(self) -> Tensor:
        """The output buffer. all_reduce and broadcast are in place: torch offers nothing else."""
        return self.send if self.name in ("all_reduce", "broadcast") else self.recv

    def outgoing(self, salt: int) -> Line:
        return pattern.sent(rank=self.rank, salt=salt, first=0, count=self.send.numel())

    def run(self) -> None:
        """Run once. On a GPU this only enqueues it."""
        match self.name:
            case "all_reduce":
                dist.all_reduce(self.send)
            case "all_gather":
                _GATHER(self.recv, self.send)
            case "reduce_scatter":
                _SCATTER(self.recv, self.send)
            case "all_to_all":
                dist.all_to_all_single(self.recv, self.send)
            case "broadcast":
                dist.broadcast(self.send, ROOT)
            case "sendrecv" if self.world == 1:
                self.recv.copy_(self.send)  # torch refuses to send to the own rank
            case "sendrecv":
                to, by = (self.rank + 1) % self.world, (self.rank - 1) % self.world
                both = [dist.P2POp(dist.isend, self.send, to), dist.P2POp(dist.irecv, self.recv, by)]
                for work in dist.batch_isend_irecv(both):
                    work.wait()

    def incoming(self, salt: int) -> list[Line]:
        """Expected content of `result`."""
        block, whole = self.block, self.block * self.world
        match self.name:
            case "all_reduce":
                return [pattern.summed(world=self.world, salt=salt, first=0, count=whole)]
            case "reduce_scatter":
                return [pattern.summed(world=self.world, salt=salt, first=self.rank * block, count=block)]
            case "broadcast":
                return [pattern.sent(rank=ROOT, salt=salt, first=0, count=whole)]
            case "sendrecv":
                return [pattern.sent(rank=(self.rank - 1) % self.world, salt=salt, first=0, count=whole)]
        # all_gather: the block of each rank; all_to_all: of each rank's buffer this rank's block.
        first = self.rank * block if self.name == "all_to_all" else 0
        return [
            pattern.sent(rank=rank, salt=salt, first=first, count=block, offset=rank * block)
            for rank in range(self.world)
        ]


def _named(new: str, old: str) -> Any:
    # torch 2.13 renamed them and warns of the old names; 2.11 has only those.
    return getattr(dist, new, None) or getattr(dist, old)


_GATHER = _named("all_gather_single", "all_gather_into_tensor")
_SCATTER = _named("reduce_scatter_single", "reduce_scatter_tensor")
