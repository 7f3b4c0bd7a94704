"""Hang attribution on many ranks: a few of them read every status, the others read one verdict."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from trainmaster.train.parallel.rank_info import RankInfo
from trainmaster.train.run_log import RunLog
from trainmaster.train.watch import flight_recorder, hang
from trainmaster.train.watch.flight_recorder import Collective, Trace
from trainmaster.train.watch.hang import RankProcess, RankStatus
from trainmaster.train.watch.stop import Stop
from trainmaster.train.watch.watchdog import Watchdog

RANKS, MISSING = 64, 41
LEADERS = 16  # at most, whatever the number of nodes


class Counting:
    """A connection to a real store that counts the values read over it, and the requests for them."""

    def __init__(self, store: Any) -> None:
        self._store, self.values, self.requests = store, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        self.requests += 1
        return bool(self._store.check(keys))

    def get(self, key: str) -> bytes:
        self.values, self.requests = self.values + 1, self.requests + 1
        return bytes(self._store.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.values, self.requests = self.values + len(keys), self.requests + 1
        return list(self._store.multi_get(keys))


def waiting_since(seconds: float) -> Trace:
    """A rank that has waited this long in a collective that may take 120 s."""
    where = Collective(
        group="gloo:default_pg.0", seq=7, name="all_reduce", elements=1, since=time.time() - seconds, limit_s=120.0
    )
    return Trace(waiting=(where,), begun=(where,))


def open_store(waiting: Trace) -> Counting:
    """A store with the status of every rank; all but one wait."""
    store = Counting(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))  # type: ignore[attr-defined]
    for rank in range(RANKS):
        trace = Trace() if rank == MISSING else waiting
        store.set(f"watchdog/pulse/{rank}", hang.render(RankStatus(beats=rank, doing="train", step=3, trace=trace)))
    return store


def watchdog_of(rank: int, store: Counting, *, per_node: int, timeout_s: float = 120.0) -> Watchdog:
    node, local = divmod(rank, per_node)
    info = RankInfo(
        rank=rank, world_size=RANKS, local_rank=local, local_world_size=per_node, node_rank=node,
        nodes=RANKS // per_node, master=("127.0.0.1", 1),
    )  # fmt: skip
    watchdog = Watchdog(info, stop=Stop(None), run_log=RunLog(info, None), timeout_s=timeout_s)
    watchdog._everyone = [RankProcess(rank=one, node=one // per_node, host="far", pid=one) for one in range(RANKS)]
    watchdog._connect = lambda: store  # type: ignore[assignment, return-value]
    return watchdog


@pytest.mark.parametrize("per_node", [8, 1])
def test_the_ranks_together_read_a_number_of_values_that_grows_with_their_number_alone(per_node: int) -> None:
    waiting = waiting_since(60)
    store, found = open_store(waiting), []
    for rank in range(RANKS):
        watchdog = watchdog_of(rank, store, per_node=per_node)
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
    leaders = min(LEADERS, RANKS // per_node)
    assert store.values == 2 * leaders * RANKS + (RANKS - leaders)
    assert store.requests == 2 * leaders * 2 + (RANKS - leaders) * 2, "a check and a read, of all keys at once"


@pytest.mark.parametrize(("rank", "values"), [(0, RANKS), (9, 0)])
def test_before_the_verdict_is_due_only_leaders_read_every_status(
    monkeypatch: pytest.MonkeyPatch, rank: int, values: int
) -> None:
    waiting = waiting_since(36)  # 0.3 of the limit: leaders look at 0.25, the others at 0.6
    store = open_store(waiting)
    looks: list[float] = []

    def read() -> Trace:
        looks.append(time.monotonic())
        return waiting

    monkeypatch.setattr(flight_recorder, "read", read)
    watchdog = watchdog_of(rank, store, per_node=8, timeout_s=0.2)  # a look every 0.01 s
    watching = threading.Thread(target=watchdog._watch)
    watching.start()
    while len(looks) < 5:
        time.sleep(0.01)
    watchdog._over.set()
    watching.join()
    assert store.values == values


@pytest.mark.slow
def test_a_store_that_stands_still_keeps_no_rank_beyond_its_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped: it takes every question and answers none."""
    limit_s, still, exits = 4.0, threading.Event(), list[float]()
    waiting = replace(waiting_since(0).waiting[0], limit_s=limit_s)

    class Still:
        def check(self, _keys: list[str]) -> bool:
            return still.wait()

        def set(self, _key: str, _value: str) -> None:
            still.wait()

    monkeypatch.setattr(flight_recorder, "read", lambda: Trace(waiting=(waiting,), begun=(waiting,)))
    watchdog = watchdog_of(8, Still(), per_node=8, timeout_s=limit_s)  # type: ignore[arg-type]

    def leave(code: int) -> None:
        assert code == 1
        exits.append(time.time() - waiting.since)
        watchdog._over.set()

    monkeypatch.setattr("trainmaster.train.watch.watchdog._exit", leave)
    watchdog._watch()
    still.set()
    assert 0.9 * limit_s <= exits[0] < 1.25 * limit_s, "three questions of 2 s each would take it to 7 s"
    assert watchdog._hang is not None and watchdog._hang.ranks == (0,), "who has the store is named"
