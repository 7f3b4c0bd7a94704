"""The simulated fabric slows exactly the flows that cross a bad part, and refuses what it cannot be."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations
from statistics import mean, stdev

import pytest

from trainmaster.core.errors import UsageError
from trainmaster.sim.fabric import Fabric, Shape, parse

QUIET = "nodes=16,racks=4,spines=2,gbps=10,noise=0"


def slow_pairs(words: str) -> set[tuple[str, str]]:
    fabric = Fabric(parse(f"{QUIET},{words}"))
    answers = {pair: fabric.measure([pair])[0] for pair in combinations(fabric.nodes, 2)}
    return {pair for pair, gbps in answers.items() if gbps is None or gbps < 9.9}


def test_a_healthy_fabric_is_fast_everywhere() -> None:
    assert slow_pairs("seed=1") == set()


def test_each_fault_slows_the_flows_through_it_and_no_other() -> None:
    fabric = Fabric(parse(QUIET))
    pairs = list(combinations(fabric.nodes, 2))
    cross = [p for p in pairs if fabric.racks[p[0]] != fabric.racks[p[1]]]
    touches = lambda p, leaf: leaf in (fabric.racks[p[0]], fabric.racks[p[1]])  # noqa: E731
    assert slow_pairs("fault=node:n005:0.5") == {p for p in pairs if "n005" in p}
    assert slow_pairs("fault=dead:n005") == {p for p in pairs if "n005" in p}
    assert slow_pairs("fault=leaf:leaf01:0.5") == {p for p in cross if touches(p, "leaf01")}
    assert slow_pairs("fault=leaf-all:leaf01:0.5") == {p for p in pairs if touches(p, "leaf01")}
    assert slow_pairs("fault=pair:n001-n009:0.5") == {("n001", "n009")}
    link = slow_pairs("fault=link:leaf01-spine1:0.5")
    assert link == {p for p in cross if ("link", "leaf01-spine1") in fabric.route(*p)}
    assert 0 < len(link) < len({p for p in cross if touches(p, "leaf01")})
    assert slow_pairs("fault=spine:spine0:0.5") == {p for p in cross if ("switch", "spine0") in fabric.route(*p)}


def test_the_worst_part_sets_the_speed_and_the_dead_give_no_answer() -> None:
    fabric = Fabric(parse(f"{QUIET},fault=node:n000:0.3,fault=node:n004:0.8,fault=dead:n008"))
    assert fabric.measure([("n000", "n004"), ("n001", "n008")]) == [pytest.approx(2.0), None]


def test_noise_is_lognormal_and_seeded() -> None:
    words = "nodes=2,racks=1,gbps=10,noise=0.05,seed="
    first, second, other = (Fabric(parse(words + seed)) for seed in ("7", "7", "8"))
    draws = [fabric.measure([("n000", "n001")])[0] for fabric in (first, second, other)]
    assert draws[0] == draws[1] != draws[2]
    logs = [math.log((first.measure([("n000", "n001")])[0] or 0) / 10) for _ in range(4000)]
    assert abs(mean(logs)) < 0.005 and abs(stdev(logs) - 0.05) < 0.005


def test_flows_share_an_uplink_only_where_asked() -> None:
    pairs = [(f"n{i:03d}", f"n{i + 8:03d}") for i in range(8)]
    plain, shared = Fabric(parse(QUIET)), Fabric(parse(f"{QUIET},uplink_flows=1"))
    load = Counter(part for pair in pairs for part in plain.route(*pair) if part[0] == "link")
    fullest = [max(load[part] for part in plain.route(*pair) if part[0] == "link") for pair in pairs]
    assert max(fullest) > 1, "nothing is shared: the test shows nothing"
    assert plain.measure(pairs) == [pytest.approx(10)] * 8
    assert shared.measure(pairs) == [pytest.approx(10 / many) for many in fullest]


def test_racks_fill_evenly() -> None:
    fabric = Fabric(Shape(nodes=33, racks=4))
    sizes = [list(fabric.racks.values()).count(leaf) for leaf in sorted(set(fabric.racks.values()))]
    assert sum(sizes) == 33 and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("nodes=many", "not a number"),
        ("node=4", "no such word"),
        ("nodes=0", "nodes"),
        ("nodes=4,racks=5", "racks"),
        ("noise=nan", "noise"),
        ("uplink_flows=0", "uplink_flows"),
        ("fault=cable:n001", "the kind is one of"),
        ("fault=node:n001:1.5", "not between"),
        ("fault=node:n999:0.5", "there is no such part"),
        ("fault=link:leaf01-spine99:0.5", "there is no such part"),
        ("fault=pair:n001-n001:0.5", "there is no such part"),
    ],
)
def test_what_cannot_be_is_refused(words: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Fabric(parse(words))
