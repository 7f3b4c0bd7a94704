"""Which GPU a rank takes, and what `deterministic` sets before it is opened."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from trainmaster.core.errors import UsageError
from trainmaster.train.parallel import shard
from trainmaster.train.parallel.rank_info import RankInfo


def rank_info(rank: int, ranks: int) -> RankInfo:
    return RankInfo(
        rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks, node_rank=0, nodes=1, master=None
    )


def devices(monkeypatch: pytest.MonkeyPatch, *, ranks: int, groups: int, gpus: int) -> list[int | None]:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    infos = [rank_info(rank, ranks).in_group(groups) for rank in range(ranks)]
    return [shard.pick_device("auto", info).index for info in infos]


def test_every_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices(monkeypatch, ranks=4, groups=1, gpus=4) == [0, 1, 2, 3]
    assert devices(monkeypatch, ranks=4, groups=2, gpus=4) == [0, 1, 2, 3]


def test_only_groups_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices(monkeypatch, ranks=4, groups=2, gpus=2) == [0, 1, 0, 1]
    assert devices(monkeypatch, ranks=2, groups=2, gpus=1) == [0, 0]
    for groups in (1, 2):  # the second: two ranks of one group
        with pytest.raises(UsageError, match="at most one process per GPU"):
            devices(monkeypatch, ranks=4, groups=groups, gpus=1)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    benchmark, fill = torch.backends.cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory
    from torch._inductor import config

    with config.patch(deterministic=config.deterministic):
        yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory = benchmark, fill


@pytest.mark.usefixtures("kept")
def test_one_order_is_set_for_torch_cublas_and_the_compiler() -> None:
    from torch._inductor import config

    shard.use_one_order()
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert config.deterministic
    # An operation that cannot add in one order is refused, and not done in any order.
    assert torch.get_deterministic_debug_mode() == 2
