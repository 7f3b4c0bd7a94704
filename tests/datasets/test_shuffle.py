"""A shuffled order holds everything once, and every pass has its own."""

from __future__ import annotations

import itertools

import pytest

from trainmaster.datasets._shuffle import shuffled


def order(size: int, *, seed: int = 1, turn: int = 0) -> list[int]:
    return [shuffled(place, size, seed=seed, turn=turn) for place in range(size)]


@pytest.mark.parametrize("size", [*range(1, 40), 255, 256, 257, 1000, 4097])
def test_everything_comes_once(size: int) -> None:
    assert sorted(order(size)) == list(range(size))


def test_passes_and_seeds_differ_and_neighbours_part() -> None:
    first = order(1000)
    assert len({tuple(first), tuple(order(1000, turn=1)), tuple(order(1000, seed=2)), tuple(range(1000))}) == 4
    assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(first)) < 20
    # As far from home as chance has it: the mean distance of two random places is a third of the length.
    assert 280 < sum(abs(place - found) for place, found in enumerate(first)) / 1000 < 390


def test_a_place_among_trillions_needs_no_table() -> None:
    assert len({shuffled(place, 10**13, seed=0, turn=3) for place in range(2000)}) == 2000
