"""Layouts that no rule covers are planned by torch on rank 0, and each rank gets its own share alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

SCRIPT = """
import os, pickle, sys, torch, torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor, Shard
from trainmaster.train.checkpoint.gathered_plan import GatheredShares
from trainmaster.train.checkpoint.layout import Layout

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
cut = [Shard(0), Shard(1)]  # along two dimensions at once
tensor = DTensor.from_local(torch.full((3, 4), float(rank)), mesh, cut, run_check=False)
state = {"model": {"both": tensor, "alike": torch.ones(2)}, "settings": {"lr": 0.1}}
plans, unpack = [], distributed_c10d._tensor_to_object

def counted(*arguments):
    found = unpack(*arguments)  # every collective of objects unpacks what it received here
    if any(isinstance(item, WriteItem) for item in (found if isinstance(found, list) else [])):
        plans.append(found)
    return found

distributed_c10d._tensor_to_object = counted
layout = Layout(state, group=dist.group.WORLD, files=1)
assert len(plans) == (2 if rank == 0 else 0), "all plans go to rank 0, and to no other"
assert isinstance(layout._shares, GatheredShares)
tensors, things = layout.pick(state)
names = [index.fqn for index in layout._indices]
print(rank, sorted(names), len(things), flush=True)
if rank == 0:
    index = pickle.loads(layout.index(things))
    print(sorted((i.fqn, tuple(i.offset or ()), w.relative_path) for i, w in index.storage_data.items()), flush=True)
dist.barrier()
"""


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_a_tensor_that_is_cut_twice() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ours = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    begun = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SCRIPT],
            env={**os.environ, **ours, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate() for process in begun]
    assert [process.returncode for process in begun] == [0, 0], said
    lines = sorted(line for out, _ in said for line in out.splitlines())
    held = [line for line in lines if line[0].isdigit()]
    assert sum("model.alike" in line for line in held) == 1  # what both have is written once
    assert all("model.both" in line for line in held)
    (index,) = (line for line in lines if line.startswith("["))
    for part in ("('model.both', (0, 0), '__0_0.distcp')", "('model.both', (3, 0), '__1_0.distcp')", "model.alike"):
        assert part in index
    assert "settings.lr" in index
