"""Process groups: each kind of work has its own time limit, and no group connects every rank with every other."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fork_server import ForkServer
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.schema import build
from trainmaster.train.parallel import shard
from trainmaster.train.parallel.groups import open_group

from .runs import ALONE

RANKS, GROUPS = 5, 4
SOCKETS = """
import os, torch
from trainmaster.node.ranks import detect
from trainmaster.train.parallel import shard
from trainmaster.train.parallel.groups import open_group
from trainmaster.train.parallel.rank_info import find_rank_info

shard.join(find_rank_info(detect(os.environ)), torch.device("cpu"), timeout_s=120)
groups = [open_group(120, name) for name in ("save", "load", "copy", "upload")]
links = (os.readlink(entry) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry))
print(sum(link.startswith("socket:") for link in links), flush=True)
shard.leave()
"""


def limit_of(group: Any) -> timedelta:
    found: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return found


def test_each_kind_of_work_has_its_own_limit() -> None:
    limits = build(TrainConfig, {"timeouts": {"first_step_s": 70, "step_s": 50, "load_s": 60, "save_s": 80}}).timeouts
    shard.join(ALONE, torch.device("cpu"), timeout_s=limits.first_step_s)
    try:
        save, load = open_group(limits.save_s, "checkpoint_save"), open_group(limits.load_s, "checkpoint_load")
        whole = dist.distributed_c10d._get_default_group()
        assert limit_of(whole).total_seconds() == 70
        shard.limit_collectives(limits.step_s)  # after the first step
        assert [limit_of(group).total_seconds() for group in (whole, save, load)] == [50, 80, 60]
    finally:
        dist.destroy_process_group()


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
@pytest.mark.spawns
def test_the_sockets_of_a_rank_do_not_grow_with_ranks_times_groups(programs: ForkServer) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    running = []
    for rank in range(RANKS):
        ours = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
        read, write = os.pipe()
        env = {**os.environ, **{key: str(value) for key, value in ours.items()}, "MASTER_ADDR": "127.0.0.1"}
        running.append((programs.start("-c", SOCKETS, env=env, out=write, err=2), read))
        os.close(write)
    counts = []
    for process, read in running:
        with os.fdopen(read) as stream:
            counts.append(int(stream.read()))
        assert process.wait() == 0
    # Rank 0 also holds the store, with a connection of each rank.
    assert max(counts[1:]) < (RANKS - 1) * (GROUPS + 1), counts
