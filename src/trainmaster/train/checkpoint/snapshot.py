"""Snapshots of the run at a step boundary: this rank's tensors in host memory, with all that the manifest records.

The first snapshot agrees with the other ranks on the layout, which is kept for the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainmaster.core.compat import UTC
from trainmaster.core.errors import CheckpointError
from trainmaster.node.host import Host
from trainmaster.train.checkpoint.contents import Contents
from trainmaster.train.checkpoint.host_copy import HostCopy
from trainmaster.train.checkpoint.layout import Layout
from trainmaster.train.checkpoint.protocol import Run
from trainmaster.train.checkpoint.provenance import collect_provenance
from trainmaster.train.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The run at one step. This rank's tensors are in host memory once `arrived` has returned."""

    state: State
    run: Mapping[str, Any]
    feed: Mapping[str, Any] | None
    origin: Mapping[str, Any]
    layout: Layout
    tensors: Sequence[Tensor]
    things: Sequence[bytes]
    arrived: Callable[[], None]


class Snapshots:
    """Takes one snapshot at a time: each uses the memory of the one before it."""

    def __init__(self, run: Run, *, group: dist.ProcessGroup, threads: int) -> None:
        """`threads` is the number of files that this rank may write at once."""
        self._run = run
        self._origin = collect_provenance(run.config, run.world.rank_info, Host(), group=group)
        self._copy = HostCopy(run.world.device, _sizes(run.optimizer))
        self._contents = Contents(run.model, run.optimizer, group=group, files=threads)

    def take(self, state: State) -> Snapshot:
        """Begin to copy this rank's part of the run as it is now."""
        run = self._run
        layout, tensors, things = self._contents.read()
        copies: list[Tensor] = []
        fault: MemoryError | None = None
        try:
            copies = self._copy.copy(tensors)
        except MemoryError as error:
            fault = error  # perhaps of this rank alone: raised later, where all ranks agree, before anything is written

        def arrived() -> None:
            if fault is not None:
                raise fault
            self._copy.wait()

        return Snapshot(
            state=state,
            run=run.identity,
            feed=read_feed_state(run.feed, state.cursor),
            origin={**self._origin, "begun_at": datetime.now(UTC).isoformat()},
            layout=layout,
            tensors=copies,
            things=things,
            arrived=arrived,
        )

    def reserve(self) -> None:
        """Take the memory of the copies ahead of the first of them."""
        self._copy.reserve()

    def forget(self) -> None:
        """Called before the run is filled anew."""
        self._contents.forget()
        self._copy.forget()

    def fence(self) -> None:
        """Order the next update of the weights behind the copy."""
        self._copy.fence()

    def held_s(self) -> float:
        """Time that the GPU waited at the fence for the last copy."""
        return self._copy.held_s()


def read_feed_state(feed: object, cursor: int) -> Mapping[str, Any] | None:
    """State of a feed that has one. Called on all ranks alike."""
    state: Mapping[str, Any] | None = feed.state(cursor) if hasattr(feed, "state") else None
    return state


def restore_feed(feed: object, state: Mapping[str, Any]) -> None:
    """Continue the feed from the state of a checkpoint."""
    if not hasattr(feed, "restore"):
        raise CheckpointError("the checkpoint holds the state of its data source, and this data source takes none")
    feed.restore(state)


def _sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    """Bytes of each tensor of an AdamW run: a weight, its two moments, its count of steps."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    shards = [(weight.to_local() if isinstance(weight, DTensor) else weight).nbytes for weight in weights]
    return [size for shard in shards for size in (shard, shard, shard, 4)]
