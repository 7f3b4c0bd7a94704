"""Isolation names nobody on a healthy fabric, and says so where the tests cannot tell. Not measured is no pass."""

from __future__ import annotations

import pytest

from trainmaster.bench.isolate import Diagnosis, RoundReport, isolate
from trainmaster.core.errors import UsageError
from trainmaster.core.results import Overall
from trainmaster.sim.fabric import Fabric, parse


def run(words: str, *, routes: bool = False, racks: bool = True, **options: float) -> Diagnosis:
    fabric = Fabric(parse(words))
    return isolate(
        fabric.nodes,
        fabric.racks if racks else None,
        fabric.measure,
        seed=fabric.shape.seed,
        route=fabric.route if routes else None,
        **options,  # type: ignore[arg-type]
    )


def candidates(said: Diagnosis) -> set[tuple[str, str]]:
    return {(suspect.kind, suspect.name) for group in said.candidates for suspect in group}


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("seed", range(12))
def test_a_healthy_fabric_passes_and_nobody_is_named(seed: int) -> None:
    said = run(f"nodes=64,racks=8,spines=4,seed={seed}")
    assert said.verdict is Overall.PASS
    assert not said.suspects and not said.candidates and not said.not_cleared


@pytest.mark.matrix(one_in=3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["glitch=0.01", "spread=0.03", "noise=0.1", "noise=0.2", "noise=0.4", "uplink_flows=2"]
)
def test_disturbance_is_not_blamed_on_a_part(words: str) -> None:
    said = run(f"nodes=64,racks=8,spines=4,seed=1,{words}")
    assert not said.suspects


@pytest.mark.matrix(one_in=2)
@pytest.mark.slow
@pytest.mark.parametrize("words", ["noise=0.4", "uplink_flows=2"])
def test_results_too_wild_to_clear_anybody_are_no_pass(words: str) -> None:
    assert run(f"nodes=64,racks=8,spines=4,seed=1,{words}").verdict is Overall.INCOMPLETE


def test_between_two_racks_both_leaves_are_told() -> None:
    said = run("nodes=16,racks=2,spines=2,fault=leaf:leaf01:0.5,seed=1")
    assert said.verdict is Overall.INCOMPLETE and not said.suspects
    assert {("switch", "leaf00"), ("switch", "leaf01")} <= candidates(said)


def test_links_that_every_flow_crosses_together_are_told_together() -> None:
    said = run("nodes=16,racks=2,spines=2,fault=link:leaf01-spine1:0.5,seed=1", routes=True)
    assert said.verdict is Overall.INCOMPLETE and not said.suspects
    assert {("link", "leaf00-spine1"), ("link", "leaf01-spine1")} <= candidates(said)


def test_one_rack_has_no_switch_or_uplink_to_name() -> None:
    said = run("nodes=16,racks=1,fault=leaf-all:leaf00:0.5,seed=1", expected_gbps=48.0)
    assert said.verdict is Overall.INCOMPLETE and not said.suspects
    assert any("even good pairs" in note for note in said.notes)


def test_a_bad_switch_is_not_named_where_racks_are_not_known() -> None:
    said = run("nodes=64,racks=8,spines=4,fault=leaf-all:leaf02:0.5,seed=1", racks=False)
    assert said.verdict is Overall.INCOMPLETE and not said.suspects
    assert candidates(said)


def test_twelve_results_of_three_nodes_may_not_be_enough_but_are_never_a_pass() -> None:
    for seed in range(5):
        said = run(f"nodes=3,racks=1,seed={seed},fault=node:n001:0.5")
        assert said.verdict is not Overall.PASS
        assert {(suspect.kind, suspect.name) for suspect in said.suspects} <= {("node", "n001")}


def test_slow_between_all_racks_is_not_passed() -> None:
    faults = ",".join(f"fault=spine:spine{s}:0.5" for s in range(4))
    said = run(f"nodes=64,racks=8,spines=4,{faults},seed=1")
    assert said.verdict is Overall.INCOMPLETE
    assert any("pairs between racks give 5" in note or "pairs between racks give 4" in note for note in said.notes)


def test_two_nodes_have_nothing_to_compare_with() -> None:
    assert run("nodes=2,racks=1,seed=1").verdict is Overall.INCOMPLETE
    slow = run("nodes=2,racks=1,fault=node:n000:0.5,seed=1", expected_gbps=48.0)
    assert slow.verdict is Overall.INCOMPLETE and not slow.suspects


def test_no_answer_at_all_is_no_pass() -> None:
    said = isolate(["a", "b", "c", "d"], None, lambda pairs: [None] * len(pairs), seed=0)
    assert said.verdict is Overall.INCOMPLETE and said.healthy_gbps is None
    assert said.not_cleared == ("node a", "node b", "node c", "node d")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_result_is_no_answer(value: float) -> None:
    said = isolate(["a", "b", "c", "d"], None, lambda pairs: [value] * len(pairs), seed=0)
    assert said.verdict is Overall.INCOMPLETE


def test_too_few_rounds_are_no_pass() -> None:
    said = run("nodes=64,racks=8,spines=4,seed=1", max_rounds=1)
    assert said.verdict is Overall.INCOMPLETE and said.not_cleared


def test_every_round_tests_each_node_once_at_most_and_is_reported() -> None:
    fabric, reports = Fabric(parse("nodes=33,racks=4,spines=4,fault=node:n003:0.5,seed=2")), list[RoundReport]()
    said = isolate(fabric.nodes, fabric.racks, fabric.measure, seed=2, progress=reports.append)  # it asserts disjoint
    assert [report.number for report in reports] == list(range(1, said.rounds + 1))
    assert all(report.pairs == 16 for report in reports)


@pytest.mark.parametrize(
    ("nodes", "racks", "options", "says"),
    [
        (["a"], None, {}, "two at the least"),
        (["a", "a", "b"], None, {}, "listed twice"),
        (["a", "b"], {"a": "r"}, {}, "no rack is given for b"),
        (["a", "b"], None, {"max_rounds": 0}, "at least 1"),
        (["a", "b"], None, {"expected_gbps": 0.0}, "above 0"),
        (["a", "b"], None, {"expected_cross_gbps": 1.0}, "give both"),
    ],
)
def test_wrong_questions_are_refused(
    nodes: list[str], racks: dict[str, str] | None, options: dict[str, float], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        isolate(nodes, racks, lambda pairs: [1.0] * len(pairs), seed=0, **options)  # type: ignore[arg-type]
