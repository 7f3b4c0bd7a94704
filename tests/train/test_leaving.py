"""Ranks leave a finished run without an error, however late one of them is."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sshd import free_port

pytestmark = pytest.mark.spawns

RANK = """
import sys, time
import torch.distributed as dist
from trainmaster.train.parallel import shard

rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
barrier, store = dist.barrier, dist.distributed_c10d._get_default_store()

def slow() -> None:
    barrier()
    if rank == 1:  # a connection of its barrier is still being made
        time.sleep(2)
        store.set("address", "here")
        store.get("address")

dist.barrier = slow
shard.leave()
"""


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_the_store_stays_until_the_last_rank_has_left() -> None:
    """Rank 0 ended with the store, and a rank that was late ended a finished run with an error."""
    port = str(free_port())
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), port], stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
