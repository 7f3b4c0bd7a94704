"""Collectives without a published baseline: the site's figures, peers or the link decide, else it is a warning."""

from __future__ import annotations

from dataclasses import replace

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


@pytest.mark.parametrize("collective", ["all_to_all", "sendrecv"])
@pytest.mark.parametrize(("gbps", "wanted"), [(45.0, Verdict.PASS), (20.0, Verdict.WARN), (2.0, Verdict.FAIL)])
def test_between_nodes_a_rank_has_its_share_of_the_network(collective: str, gbps: float, wanted: Verdict) -> None:
    link = link_limits.find_link(instance="ml.p5.48xlarge", nodes=4, gpu="H100-SXM", gpus=8)
    measured = unjudged(gbps)
    measured = replace(measured, values={**measured.values, "collective": collective})
    (found,) = link_limits.settle([measured], link=link)
    assert found.verdict is wanted, found.reason
    assert verdict(45.0, link=link) is Verdict.FAIL  # all_reduce uses the network of the whole node


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


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "x = 3",
        '[all_reduce]\n"big" = 3',
        '[all_reduce]\n"1G" = "fast"',
        '[all_reduce]\n"1G" = 0',
        '[all_reduce]\n"1G" = nan',
        '[all_reduce]\n"1G" = inf',
        '[all_reduce]\n"1G" = -5',
    ],
)
def test_a_file_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        link_limits.parse_site(text)


def test_what_was_judged_or_not_measured_stays() -> None:
    judged, lost = ok("fine", collective="all_reduce", busbw_gbps={"8": 1.0}), error("no rank", action="see")
    whole = error("measured, not judged: there is no baseline for any of it", action="state it")
    assert link_limits.settle([judged, lost, whole], link=None) == [judged, lost]


def nodes(*rates: float) -> dict[str, list[Finding]]:
    return {f"n{number}": [unjudged(gbps)] for number, gbps in enumerate(rates)}


def settled(rates: list[float], **words: object) -> list[Verdict]:
    found = link_limits.settle_nodes(nodes(*rates), **{"link": None, **words})  # type: ignore[arg-type]
    return [findings[0].verdict for findings in found.values()]


def test_peers_decide_among_three_nodes_or_more() -> None:
    assert settled([10.0, 10.0, 10.0, 10.0, 6.0]) == [Verdict.PASS] * 4 + [Verdict.FAIL]
    assert settled([10.0, 1.0]) == [Verdict.WARN, Verdict.WARN]


def test_nodes_that_are_all_slow_are_no_proof_for_each_other() -> None:
    link = link_limits.find_link(instance="ml.p5.48xlarge", nodes=1, gpu="H100-SXM")
    assert settled([4.0] * 4, link=link) == [Verdict.FAIL] * 4
    assert settled([360.0] * 4, link=link) == [Verdict.PASS] * 4
    assert settled([360.0, 360.0, 360.0, 250.0], link=link) == [Verdict.PASS] * 3 + [Verdict.FAIL]


def test_the_sites_figure_comes_before_peers() -> None:
    site = link_limits.parse_site('[all_reduce]\n"1G" = 400.0\n')
    assert settled([100.0] * 4, site=site) == [Verdict.FAIL] * 4
    assert settled([100.0] * 4) == [Verdict.PASS] * 4
