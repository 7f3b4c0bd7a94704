"""RankProcess keeps the others waiting, from what is known of each rank: the surest evidence names it, in one line."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from trainmaster.train.parallel.rank_info import RankInfo
from trainmaster.train.run_log import RunLog
from trainmaster.train.watch import flight_recorder, hang, watchdog
from trainmaster.train.watch.flight_recorder import Collective, Trace
from trainmaster.train.watch.hang import RankProcess, RankStatus, RankView
from trainmaster.train.watch.stop import Stop
from trainmaster.train.watch.watchdog import Watchdog

ENTRY = {
    "collective_seq_id": 25, "input_dtypes": ["Float"], "input_sizes": [[4, 8], [3]], "is_p2p": False, "op_id": 25,
    "output_sizes": [[1]], "process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce", "retired": False,
    "state": "scheduled", "time_created_ns": 1_000_000_000_000, "time_discovered_completed_ns": 0, "timeout_ms": 15000,
}  # fmt: skip  # as torch 2.13 writes it


def at(seq: int) -> Collective:
    found = flight_recorder.parse({**ENTRY, "collective_seq_id": seq})
    assert found is not None
    return found


def view(rank: int, seq: int, *, doing: str = "train", silent_s: float = 0.0, state: str | None = "S") -> RankView:
    pulse = RankStatus(beats=7, doing=doing, step=11, trace=Trace(begun=(at(seq),)))
    return RankView(
        process=RankProcess(rank=rank, node=rank // 2, host=f"gpu-{rank // 2}", pid=100 + rank),
        status=pulse,
        silent_s=silent_s,
        state=state,
    )


def find(*views: RankView) -> hang.Hang:
    return hang.attribute(views, Trace(waiting=(at(25),), begun=(at(25),)), step=11, now=1060.0)


def test_a_record_is_read_and_a_strange_one_is_passed_over() -> None:
    one = at(25)
    assert (one.group, one.name, one.elements, one.since, one.limit_s) == (
        "gloo:default_pg.0",
        "all_reduce",
        35,
        1000,
        15,
    )
    assert flight_recorder.parse({"is_p2p": True}) is None
    assert flight_recorder.parse({"profiling_name": 3}) is None
    assert one.share_waited(1007.5) == 0.5


def test_a_stopped_process_is_named_with_its_node_and_the_collective() -> None:
    found = find(view(0, 25), view(1, 25), view(2, 24, state="T"), view(3, 25))
    assert (found.ranks, found.nodes) == ((2,), (1,))
    group = "of gloo:default_pg.0 (35 elements)"
    assert found.line == (
        "hang: rank 2 (node 1, gpu-1, pid 102) is stopped (SIGSTOP, or a debugger holds it), last seen in all_reduce "
        f"#24 {group}; 3 of 4 ranks wait in all_reduce #25 {group} in step 12 since 60 s"
    )


def test_evidence_goes_from_sure_to_less_sure() -> None:
    silent, behind = view(2, 24, silent_s=30.0, state=None), view(3, 24, doing="data")
    assert find(view(0, 25), view(1, 25), silent, behind).ranks == (2,)
    found = find(view(0, 25), view(1, 25), view(2, 25), behind)
    assert found.ranks == (3,)
    assert "is alive but has not entered it: it waits for data" in found.line
    assert find(view(0, 25), view(1, 25, state="gone"), silent).ranks == (1,)


def test_who_is_no_member_of_a_group_is_not_missing_in_it() -> None:
    entry = {**ENTRY, "process_group": ["1", "mesh_shard"]}
    mine = flight_recorder.parse(entry)
    assert mine is not None
    late = flight_recorder.parse({**entry, "collective_seq_id": 24})
    assert late is not None
    member = replace(view(1, 25), status=RankStatus(beats=7, doing="train", step=11, trace=Trace(begun=(late,))))
    found = hang.attribute([view(0, 25), member, view(2, 25)], Trace(waiting=(mine,)), step=11, now=1060.0)
    assert found.ranks == (1,)


def test_when_all_have_come_it_is_the_network_or_a_gpu() -> None:
    found = find(view(0, 25), view(1, 25), view(2, 26))
    assert found.ranks == ()
    assert "all 3 ranks are in all_reduce #25" in found.line
    assert "the network or a GPU hangs" in found.line


def test_a_pulse_survives_the_store_and_garbage_is_no_pulse() -> None:
    pulse = RankStatus(beats=3, doing="eval", step=4, trace=Trace(waiting=(at(2),), begun=(at(2), at(1))))
    assert hang.parse(hang.render(pulse)) == pulse
    assert [hang.parse(text) for text in ("", "{}", "[1]", '{"beats":1,"doing":"x","step":1,"trace":{}}')] == [None] * 4


def test_one_rank_that_has_something_to_lose_keeps_all_of_them() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    places = [
        RankInfo(rank=rank, world_size=2, local_rank=rank, local_world_size=2, node_rank=0, nodes=1, master=None)
        for rank in range(2)
    ]
    first, second = (Watchdog(rank_info, stop=Stop(None), run_log=RunLog(rank_info, None)) for rank_info in places)
    left: list[str] = []
    first.open_window(left.append)
    first._vote(store, "SIGTERM")
    second._vote(store, "SIGTERM")  # its first step is done
    first._vote(store, "SIGTERM")
    first.close_window()  # returns: they stay
    assert left == []
    assert store.check([watchdog._STAY])


def test_a_lone_rank_leaves_by_itself_and_only_inside_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_info = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, nodes=1, master=None)
    codes: list[int] = []
    monkeypatch.setattr(watchdog, "_exit", codes.append)
    left: list[str] = []
    for closed in (True, False):
        one = Watchdog(rank_info, stop=Stop(None), run_log=RunLog(rank_info, None))
        one.open_window(left.append)
        if closed:
            one.close_window()
        one._vote(None, "SIGUSR1")
    assert (left, codes) == (["SIGUSR1"], [75])
