"""Ranks that a launcher restarted find none of the dead attempt's keys in the store that both share."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from trainmaster.node.ranks import detect
from trainmaster.train.parallel import rendezvous
from trainmaster.train.parallel.rank_info import RankInfo, find_rank_info


def rank_info(port: int, restart: int) -> RankInfo:
    env = {
        "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TORCHELASTIC_RESTART_COUNT": str(restart),
    }  # fmt: skip
    return find_rank_info(detect(env))


def test_a_restart_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # open_store sets them
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # as torchrun does: its agent keeps the store
    limit = timedelta(seconds=10)
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)  # type: ignore[attr-defined]
    first = rendezvous.open_store(rank_info(agent.port, 0), timeout_s=10)
    first.set("address", "of the dead")
    assert rendezvous.connect(rank_info(agent.port, 0)).check(["address"])
    for open_again in (lambda: rendezvous.open_store(rank_info(agent.port, 1), timeout_s=10),
                       lambda: rendezvous.connect(rank_info(agent.port, 1))):  # fmt: skip
        assert not open_again().check(["address"])
