"""Shares of ranks whose tensors are cut in a way that no rule here covers: planned by torch on rank 0.

Every rank sends its plan to rank 0 and gets its own share back; only rank 0 holds all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from trainmaster.train.checkpoint.write_plan import Entry, Part


class GatheredShares:
    """The parts of the ranks that are known here: on rank 0 of all, elsewhere of this rank alone."""

    def __init__(self, parts: dict[int, list[Part]]) -> None:
        self._parts = parts

    def of(self, rank: int) -> list[Part]:
        return self._parts[rank]


def gather_shares(items: Sequence[WriteItem], *, group: dist.ProcessGroup) -> GatheredShares:
    """Plan on rank 0; what several ranks hold alike is written by one of them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = [item for item in items if item.type != WriteItemType.BYTE_IO]
    plans: list[Any] | None = [None] * ranks if rank == 0 else None
    dist.gather_object(mine, plans, dst=0, group=group)
    shares: list[list[Part]] | None = None
    if plans is not None:
        planner = DefaultSavePlanner()
        planner.set_up_planner({}, is_coordinator=True)
        planned = planner.create_global_plan([SavePlan(plan, planner_data={}) for plan in plans])[0]
        shares = [[_part(item) for item in plan.items] for plan in planned]
    own: list[Any] = [None]
    dist.scatter_object_list(own, shares, src=0, group=group)
    known = dict(enumerate(shares)) if shares is not None else {rank: own[0]}
    return GatheredShares(known)


def _part(item: WriteItem) -> Part:
    assert item.tensor_data is not None
    data = item.tensor_data
    entry = Entry(name=item.index.fqn, size=data.size, dtype=data.properties.dtype, dim=0, holders=())
    return Part(entry=entry, offsets=data.chunk.offsets, sizes=data.chunk.sizes)
