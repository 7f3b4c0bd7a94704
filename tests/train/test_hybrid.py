"""Four ranks as two copies of two: a real 2-D mesh, the curve of one process and of full sharding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainmaster.core.config.parallel import ParallelConfig
from trainmaster.core.errors import UsageError
from trainmaster.train.parallel.rank_info import RankInfo
from trainmaster.train.parallel.shard import World, build_mesh

from .runs import RunHere, Start, tiny

# float32 on a CPU: what is left is the order of sums.
TOLERANCE = 1e-4


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_two_by_two_draws_the_curve_of_one_and_of_four(start: Start, run_here: RunHere, tmp_path: Path) -> None:
    shape: dict[str, Any] = {"steps": 5, "batch_sequences": 16, "eval_sequences": 0}
    alone = run_here(tmp_path / "1", tiny(**shape))
    hybrid = {"sharding": "hybrid", "shard_ranks": 2}
    for name, parallel in (("4", {"reduce": "each"}), ("2x2", hybrid)):
        ran = start(tmp_path / name, tiny(**shape, micro_sequences=2, parallel=parallel), ranks=4).finish()
        assert ran.codes == [0, 0, 0, 0], ran.output
        assert ran.losses == pytest.approx(alone.losses, abs=TOLERANCE)
        norms = [[item["data"]["grad_norm"] for item in one.named("STEP", "metrics")] for one in (ran, alone)]
        assert norms[0] == pytest.approx(norms[1], abs=10 * TOLERANCE)
    # What two copies wrote, one process reads: a checkpoint does not know how it was sharded.
    further = {**shape, "steps": 6}
    on, straight = run_here(tmp_path / "2x2", tiny(**further)), run_here(tmp_path / "1", tiny(**further))
    assert on.named("CHECKPOINT", "loaded")[-1]["data"]["step"] == 5
    assert on.losses[6] == pytest.approx(straight.losses[6], abs=TOLERANCE)


@pytest.fixture
def rank_of_four() -> Iterator[World]:
    """Rank 3 of four on two nodes, with a group that moves nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    rank_info = RankInfo(rank=3, world_size=4, local_rank=1, local_world_size=2, node_rank=1, nodes=2, master=None)
    yield World(rank_info=rank_info, device=torch.device("cpu"))
    dist.destroy_process_group()


def test_the_mesh_has_a_row_for_each_copy(rank_of_four: World) -> None:
    hybrid = build_mesh(rank_of_four, ParallelConfig(sharding="hybrid"))  # the ranks of a node share one
    assert hybrid.mesh.tolist() == [[0, 1], [2, 3]]
    assert list(hybrid.get_coordinate() or ()) == [1, 1]
    assert build_mesh(rank_of_four, ParallelConfig(sharding="hybrid", shard_ranks=4)).mesh.tolist() == [[0, 1, 2, 3]]
    assert build_mesh(rank_of_four, ParallelConfig()).mesh.tolist() == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="4 are not a multiple of 3"):
        build_mesh(rank_of_four, ParallelConfig(sharding="hybrid", shard_ranks=3))
