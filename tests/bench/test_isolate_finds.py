"""The bad parts of a noisy simulated fabric are named, exactly these, in at most twelve rounds.

A seeded sample; `benchmarks/isolate.py` runs a hundred trials of each case.
"""

from __future__ import annotations

import pytest

from trainmaster.bench.isolate import Diagnosis, isolate
from trainmaster.core.results import Overall
from trainmaster.sim.fabric import Fabric, parse


def run(words: str, *, routes: bool = False) -> Diagnosis:
    fabric = Fabric(parse(words))
    route = fabric.route if routes else None
    return isolate(fabric.nodes, fabric.racks, fabric.measure, seed=fabric.shape.seed, route=route)


def named(said: Diagnosis) -> set[tuple[str, str]]:
    return {(suspect.kind, suspect.name) for suspect in said.suspects}


@pytest.mark.matrix(one_in=3)
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("fault", "truth", "routes"),
    [
        ("fault=node:n017:0.5", {("node", "n017")}, False),
        ("fault=node:n017:0.5,fault=node:n018:0.3", {("node", "n017"), ("node", "n018")}, False),
        ("fault=link:leaf05-spine3:0.5", {("link", "leaf05-spine3")}, True),
        ("fault=link:leaf05-spine3:0.5", {("link", "leaf05 uplink")}, False),
        ("fault=leaf:leaf05:0.5", {("switch", "leaf05")}, False),
        ("fault=leaf-all:leaf05:0.5", {("switch", "leaf05")}, False),
    ],
)
def test_256_nodes(fault: str, truth: set[tuple[str, str]], routes: bool, seed: int) -> None:
    said = run(f"nodes=256,racks=16,seed={seed},{fault}", routes=routes)
    assert named(said) == truth
    assert said.verdict is Overall.FAIL and said.rounds <= 12
    assert all(suspect.confidence > 0.99 and suspect.slow > 2 for suspect in said.suspects)


@pytest.mark.matrix(one_in=3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "truth"),
    [
        ("fault=node:n009:0.3", {("node", "n009")}),
        ("fault=node:n009:0.9", {("node", "n009")}),
        ("fault=dead:n009", {("node", "n009")}),
        ("fault=leaf-all:leaf02:1", {("switch", "leaf02")}),
        ("fault=node:n009:0.5,fault=leaf:leaf05:0.5", {("node", "n009"), ("switch", "leaf05")}),
        ("fault=node:n009:0.5,fault=link:leaf05-spine1:0.5", {("node", "n009"), ("link", "leaf05 uplink")}),
        ("fault=spine:spine2:0.5", {("switch", "any spine")}),
        ("noise=0.1,fault=node:n009:0.5", {("node", "n009")}),
        ("glitch=0.01,fault=node:n009:0.5", {("node", "n009")}),
        ("fault=node:n008:0.5,fault=node:n009:0.5,fault=node:n010:0.5", {("node", f"n{i:03d}") for i in (8, 9, 10)}),
    ],
)
def test_64_nodes_with_other_faults(words: str, truth: set[tuple[str, str]]) -> None:
    assert named(run(f"nodes=64,racks=8,spines=4,seed=3,{words}")) == truth


@pytest.mark.parametrize("nodes", [4, 5, 7, 16, 33])
def test_small_and_odd_numbers_of_nodes(nodes: int) -> None:
    said = run(f"nodes={nodes},racks=1,seed=4,fault=node:n001:0.5")
    assert named(said) == {("node", "n001")}


def test_the_loss_and_its_evidence_are_told() -> None:
    (suspect,) = run("nodes=64,racks=8,spines=4,fault=node:n009:0.6,seed=5").suspects
    assert suspect.loss == pytest.approx(0.6, abs=0.05)
    assert suspect.slow == suspect.measured == len(suspect.evidence)
    for shown in suspect.evidence:
        assert "n009" in (shown.a, shown.b)
        assert shown.gbps is not None and shown.gbps < 0.6 * shown.healthy_gbps


@pytest.mark.slow
def test_the_same_seed_asks_and_answers_the_same() -> None:
    words = "nodes=32,racks=4,spines=4,fault=link:leaf01-spine2:0.5,seed=6"
    assert run(words) == run(words)
