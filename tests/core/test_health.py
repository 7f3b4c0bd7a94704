"""A cluster passes only when every node that was asked has answered and passed."""

from __future__ import annotations

import pytest

from trainmaster.core.errors import SpecError
from trainmaster.core.health import ClusterHealth, NodeHealth, Silent
from trainmaster.core.results import CheckResult, Overall, Verdict, error, fail, ok, skip, warn


def node(name: str, *findings: object) -> NodeHealth:
    result = CheckResult(check="a", findings=findings, took_s=0.1)  # type: ignore[arg-type]
    return NodeHealth(node=name, level=1, planned=("a",), results=(result,))


GOOD = node("n1", ok("fine", celsius=31.5))


def cluster(*nodes: NodeHealth, asked: tuple[str, ...] = ("n1", "n2"), **more: object) -> ClusterHealth:
    return ClusterHealth(asked=asked, nodes=nodes, **more)  # type: ignore[arg-type]


def test_all_heard_and_good() -> None:
    assert cluster(GOOD, node("n2", ok("fine"), skip("no", proof="x"))).overall is Overall.PASS


@pytest.mark.parametrize(
    ("second", "overall"),
    [
        (warn("x", action="y"), Overall.WARN),
        (fail("x", action="y"), Overall.FAIL),
        (error("x", action="y"), Overall.INCOMPLETE),
    ],
)
def test_the_worst_node_decides(second: object, overall: Overall) -> None:
    assert cluster(GOOD, node("n2", second)).overall is overall


def test_a_node_that_was_asked_and_not_heard_is_incomplete() -> None:
    assert cluster(GOOD).overall is Overall.INCOMPLETE
    silent = Silent(node="n2", verdict=Verdict.ERROR, reason="no route", action="look at its power")
    assert cluster(GOOD, silent=(silent,)).overall is Overall.INCOMPLETE
    assert cluster(node("n1", fail("x", action="y")), silent=(silent,)).overall is Overall.FAIL


def test_no_node_at_all_is_no_pass() -> None:
    assert cluster(asked=()).overall is Overall.INCOMPLETE


def test_what_is_found_between_nodes_counts() -> None:
    drift = CheckResult(check="drift", findings=(fail("n2 runs another driver", action="x", device="n2"),), took_s=0)
    assert cluster(GOOD, node("n2", ok("fine")), cluster=(drift,)).overall is Overall.FAIL


def test_json_reads_back_the_same_and_the_verdict_is_judged_again() -> None:
    health = cluster(GOOD, silent=(Silent(node="n2", verdict=Verdict.ERROR, reason="a", action="b"),))
    text = health.to_json()
    assert ClusterHealth.from_json(text) == health
    assert (
        ClusterHealth.from_json(text.replace('"overall": "INCOMPLETE"', '"overall": "PASS"')).overall
        is Overall.INCOMPLETE
    )


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"asked": ["n1"], "nodes": [{"node": "n1"}]}', '{"asked": "n1", "nodes": []}']
)
def test_damaged_json_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        ClusterHealth.from_json(text)
