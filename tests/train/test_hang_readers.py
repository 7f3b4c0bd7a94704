"""Hang attribution on many ranks: a few of them read every status, the others read one verdict."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from trainmaster.train.parallel.rank_info import RankInfo
from trainmaster.train.run_log import RunLog
from trainmaster.train.watch import hang
from trainmaster.train.watch.flight_recorder import Collective, Trace
from trainmaster.train.watch.hang import RankProcess, RankStatus
from trainmaster.train.watch.stop import Stop
from trainmaster.train.watch.watchdog import Watchdog

RANKS, PER_NODE, MISSING = 64, 8, 41


class Counting:
    """A connection to a real store that counts the values read over it."""

    def __init__(self, store: Any) -> None:
        self._store, self.values = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        self.values += 1
        return bytes(self._store.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.values += len(keys)
        return list(self._store.multi_get(keys))


def test_the_ranks_together_read_a_number_of_values_that_grows_with_their_number_alone() -> None:
    store = Counting(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))  # type: ignore[attr-defined]
    where = Collective(
        group="gloo:default_pg.0", seq=7, name="all_reduce", elements=1, since=time.time() - 60, limit_s=120.0
    )
    waiting = Trace(waiting=(where,), begun=(where,))
    for rank in range(RANKS):
        trace = Trace() if rank == MISSING else waiting
        store.set(f"watchdog/pulse/{rank}", hang.render(RankStatus(beats=rank, doing="train", step=3, trace=trace)))
    everyone = [RankProcess(rank=rank, node=rank // PER_NODE, host="far", pid=rank) for rank in range(RANKS)]
    found = []
    for rank in range(RANKS):
        node, local = divmod(rank, PER_NODE)
        info = RankInfo(
            rank=rank, world_size=RANKS, local_rank=local, local_world_size=PER_NODE, node_rank=node,
            nodes=RANKS // PER_NODE, master=("127.0.0.1", 1),
        )  # fmt: skip
        watchdog = Watchdog(info, stop=Stop(None), run_log=RunLog(info, None))
        watchdog._everyone, watchdog._connect = everyone, lambda: store  # type: ignore[assignment, return-value]
        if watchdog._leads:
            statuses = watchdog._statuses()
            for status in statuses:
                assert status is not None
            # A moment ago every rank but the missing one had beaten fewer times.
            watchdog._first = (
                time.monotonic() - 5,
                [
                    status if number == MISSING else RankStatus(beats=-1, doing="train", step=3, trace=waiting)
                    for number, status in enumerate(statuses)
                ],
            )
        found.append(watchdog._judge(waiting, 0.5))
    assert {verdict.ranks for verdict in found if verdict is not None} == {(MISSING,)}
    assert None not in found
    leaders = RANKS // PER_NODE
    assert store.values == 2 * leaders * RANKS + (RANKS - leaders)
