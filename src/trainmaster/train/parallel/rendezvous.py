"""Rendezvous store of the ranks, keyed by the restart of the launcher.

`torchrun --max-restarts` keeps one store for all restarts of a run. Without a prefix of its own a restarted rank finds
the addresses of the dead attempt there, and the process group cannot connect.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from trainmaster.train.parallel.rank_info import RankInfo

_CONNECT_S = 30.0


def open_store(rank_info: RankInfo, *, timeout_s: float) -> Store:
    """The store at which the ranks meet. A single rank gets one of its own, which needs no port."""
    if rank_info.master is None or rank_info.world_size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    # Through torch's own handler: under torchrun the agent holds this port already, otherwise rank 0 opens it.
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = rank_info.master[0], str(rank_info.master[1])
    limit = timedelta(seconds=timeout_s)
    store, _, _ = next(iter(rendezvous("env://", rank=rank_info.rank, world_size=rank_info.world_size, timeout=limit)))
    store.set_timeout(limit)
    return _keyed(rank_info, store)


def connect(rank_info: RankInfo) -> Store:
    """Another connection to the same store, for a thread of its own."""
    assert rank_info.master is not None, "a single rank has no store to connect to"
    host, port = rank_info.master
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S)
    )
    return _keyed(rank_info, store)


def _keyed(rank_info: RankInfo, store: Any) -> Store:
    keyed: Store = dist.PrefixStore(f"trainmaster/restart-{rank_info.restart}", store)  # type: ignore[attr-defined]
    return keyed
