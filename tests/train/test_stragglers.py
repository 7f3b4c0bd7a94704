"""Who is slow: named by its own time against the median, after so many readings, once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmaster.train.watch.stragglers import Persistent, RankTime, score


def own(rank: int, *, compute_s: float | None = 1.0, data_s: float = 0.0, burst_s: float | None = None) -> RankTime:
    return RankTime(rank=rank, node=rank // 4, step_s=2.0, data_s=data_s, compute_s=compute_s, burst_s=burst_s)


def test_the_slow_rank_stands_first_with_what_it_is_slow_in() -> None:
    ranks = [own(rank) for rank in range(7)]
    assert (found := score([*ranks, own(7, compute_s=1.6)])[0]).rank == 7
    assert (round(found.score, 3), found.what, found.node) == (0.3, "compute", 1)
    found = score([*ranks, own(7, data_s=0.5)])[0]
    assert (found.rank, round(found.score, 3), found.what) == (7, 0.25, "data")


def test_a_gpu_below_the_others_is_found_by_its_burst() -> None:
    ranks = [own(rank, compute_s=None, burst_s=0.001) for rank in range(7)]
    found = score([*ranks, own(7, compute_s=None, burst_s=0.0013)])[0]
    assert (found.rank, round(found.score, 3), found.what) == (7, 0.3, "compute (burst)")


@pytest.mark.parametrize("slow", [1, 2])
def test_without_a_majority_nobody_is_slow(slow: int) -> None:
    """With two ranks one is always above the other."""
    times = [
        own(rank, compute_s=2.0 if rank < slow else 1.0, burst_s=0.002 if rank < slow else 0.001)
        for rank in range(2 * slow)
    ]
    assert [one.name for one in score(times) if one.score > 0] == []


def test_a_node_is_slow_when_all_of_it_is() -> None:
    slow = [own(rank, compute_s=1.5 if rank // 4 == 2 else 1.0) for rank in range(12)]
    found = score(slow)
    assert (found[0].name, found[0].rank, round(found[0].score, 3)) == ("node 2", None, 0.25)
    assert {one.rank for one in found[1:5]} == {8, 9, 10, 11}
    one_rank = [own(rank, compute_s=1.5 if rank == 8 else 1.0) for rank in range(12)]
    assert [one.name for one in score(one_rank) if one.score > 0] == ["rank 8 (node 2)"]


@given(st.lists(st.floats(0.9995, 1.0005), min_size=2, max_size=16))
def test_equal_ranks_have_no_straggler(times: list[float]) -> None:
    assert all(one.score < 0.01 for one in score([own(rank, compute_s=time) for rank, time in enumerate(times)]))


def test_it_is_told_after_so_many_readings_and_again_only_after_it_was_well() -> None:
    persistent = Persistent(share=0.15, readings=3)
    slow, well = score([own(0), own(1), own(2, compute_s=2.0)]), score([own(0), own(1), own(2)])
    told = [
        [one.rank for one in persistent.add(reading)] for reading in (slow, slow, slow, slow, well, slow, slow, slow)
    ]
    assert told == [[], [], [2], [], [], [], [], [2]]
