"""Collectives without a published baseline: the site's figures, peers or the link decide, else it is a warning."""

from __future__ import annotations

import pytest

from trainmaster.bench import link_limits
from trainmaster.core.errors import UsageError
from trainmaster.core.results import Finding, Verdict, error, ok, skip

G = 1 << 30


def unjudged(gbps: float, size: int = G) -> Finding:
    return skip(
        "all_reduce: measured, not judged: no baseline", proof="-", collective="all_reduce",
        busbw_gbps={"8192": 0.1, str(size): gbps},
    )  # fmt: skip


def verdict(gbps: float, **words: object) -> Verdict:
    (found,) = link_limits.settle([unjudged(gbps)], **{"link": None, **words})  # type: ignore[arg-type]
    return found.verdict


@pytest.mark.parametrize(
    ("instance", "nodes", "gpu", "healthy", "slow", "broken"),
    [
        ("ml.p4d.24xlarge", 2, "A100-SXM4-40GB", 40.0, 20.0, 3.8),
        ("ml.g5.12xlarge", 2, "A10G", 3.5, 2.0, 0.5),
        ("ml.p5.48xlarge", 4, "H100-SXM", 330.0, 150.0, 3.8),
        ("ml.g5.12xlarge", 1, "A10G", 8.0, 2.0, 0.3),
        ("ml.g4dn.12xlarge", 1, "T4", 5.0, 1.0, 0.1),
        ("ml.g6.12xlarge", 1, "L4", 8.0, 2.0, 0.3),
        ("ml.p5.48xlarge", 1, "H100-SXM", 360.0, 180.0, 40.0),
    ],
)
def test_the_link_decides_where_no_baseline_is_published(
    instance: str, nodes: int, gpu: str, healthy: float, slow: float, broken: float
) -> None:
    link = link_limits.find_link(instance=instance, nodes=nodes, gpu=gpu)
    assert link is not None
    found = [verdict(gbps, link=link) for gbps in (healthy, slow, broken)]
    assert found == [Verdict.PASS, Verdict.WARN, Verdict.FAIL], link


def test_without_anything_to_compare_with_it_is_a_warning() -> None:
    assert verdict(5.0) is Verdict.WARN
    assert link_limits.find_link(instance="x.large", nodes=2) is None
    assert link_limits.find_link(instance=None, nodes=1, gpu=None) is None


def test_a_small_message_is_not_judged_by_the_link() -> None:
    link = link_limits.find_link(instance="ml.g5.12xlarge", nodes=2)
    (found,) = link_limits.settle([unjudged(0.01, size=65_536)], link=link)
    assert found.verdict is Verdict.WARN


def test_the_sites_figure_comes_before_the_link() -> None:
    site = link_limits.parse_site('[all_reduce]\n"1G" = 10.0\n')
    link = link_limits.find_link(instance="ml.p5.48xlarge", nodes=4)
    assert [verdict(gbps, link=link, site=site) for gbps in (9.5, 8.5, 5.0)] == [
        Verdict.PASS, Verdict.WARN, Verdict.FAIL,
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["[", "x = 3", '[all_reduce]\n"big" = 3', '[all_reduce]\n"1G" = "fast"'])
def test_a_file_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        link_limits.parse_site(text)


def test_what_was_judged_or_not_measured_stays() -> None:
    judged, lost = ok("fine", collective="all_reduce", busbw_gbps={"8": 1.0}), error("no rank", action="see")
    whole = error("measured, not judged: there is no baseline for any of it", action="state it")
    assert link_limits.settle([judged, lost, whole], link=None) == [judged, lost]


def test_peers_decide_among_three_nodes_or_more() -> None:
    nodes = {f"n{number}": [unjudged(10.0)] for number in range(4)} | {"slow": [unjudged(6.0)]}
    found = {node: findings[0].verdict for node, findings in link_limits.settle_peers(nodes).items()}
    assert found == {**{f"n{number}": Verdict.PASS for number in range(4)}, "slow": Verdict.FAIL}
    two = link_limits.settle_peers({"a": [unjudged(10.0)], "b": [unjudged(1.0)]})
    assert [findings[0].verdict for findings in two.values()] == [Verdict.SKIP, Verdict.SKIP]
