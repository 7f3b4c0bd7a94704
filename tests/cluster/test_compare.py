"""Between nodes: the one that differs is named, equals are left in peace, and a tie blames nobody."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainmaster.cluster import compare as _cluster
from trainmaster.core.health import NodeHealth
from trainmaster.core.results import CheckResult, Finding, Verdict, ok, skip


def node(name: str, *results: tuple[str, list[Finding]]) -> NodeHealth:
    found = tuple(CheckResult(check=check, findings=tuple(findings), took_s=0.0) for check, findings in results)
    return NodeHealth(node=name, level=1, planned=tuple(r.check for r in found), results=found)


def gpu_node(
    name: str, *, driver: str = "580.159.04", gpus: int = 8, model: str = "NVIDIA H200", **each: Any
) -> NodeHealth:
    """A node with equal GPUs; `each` gives a value per GPU: a number for all, or a list."""
    devices = [f"gpu{i}" for i in range(gpus)]
    count = [ok("there", listed=gpus), *(ok("there", device=d, model=model, uuid=f"{name}-{d}") for d in devices)]
    measured = [
        ok("fine", device=d, **{k: v[i] if isinstance(v, list) else v for k, v in each.items()})
        for i, d in enumerate(devices)
    ]
    return node(
        name, ("gpu_count", count), ("gpu_driver", [ok("fine", driver=driver, cuda="13.0")]), ("gpu_rates", measured)
    )


def compare(nodes: list[NodeHealth]) -> dict[str, list[Finding]]:
    return {result.check: list(result.findings) for result in _cluster.compare(nodes)}


def fleet(count: int = 16, **values: Any) -> list[NodeHealth]:
    return [gpu_node(f"n{i:02}", **values) for i in range(count)]


def test_equal_nodes_agree() -> None:
    found = compare(fleet(celsius=35.0, bf16_tflops=780.0, digest="abc"))
    assert {name: [f.verdict for f in findings] for name, findings in found.items()} == {
        "drift": [Verdict.PASS],
        "peers": [Verdict.PASS],
        "digests": [Verdict.PASS],
    }
    assert "driver" in found["drift"][0].reason


def test_the_wrong_driver_on_one_of_16_is_named_with_the_majority() -> None:
    nodes = fleet()
    nodes[11] = gpu_node("n11", driver="570.86.15")
    (finding,) = compare(nodes)["drift"]
    assert (finding.verdict, finding.device) == (Verdict.FAIL, "n11")
    assert finding.reason == "driver 570.86.15; 15 of 16 nodes have 580.159.04"
    assert finding.action
    assert finding.values["having"] == 15


def test_a_tie_is_told_and_nobody_is_blamed() -> None:
    nodes = [gpu_node(f"n{i}", driver="570" if i < 2 else "580") for i in range(4)]
    (finding,) = compare(nodes)["drift"]
    assert (finding.verdict, finding.device) == (Verdict.WARN, None)
    assert "570 on n0, n1" in finding.reason
    assert "580 on n2, n3" in finding.reason


def test_of_two_that_differ_nobody_is_blamed() -> None:
    assert [f.device for f in compare([gpu_node("a", driver="1"), gpu_node("b", driver="2")])["drift"]] == [None]


def test_a_node_with_fewer_gpus_is_named() -> None:
    nodes = fleet(5)
    nodes[3] = gpu_node("n03", gpus=7)
    assert [(f.verdict, f.device, f.values["what"]) for f in compare(nodes)["drift"]] == [("fail", "n03", "listed")]


def test_one_odd_device_is_named_with_its_node() -> None:
    nodes = fleet(5, vbios="96.00.A5")
    nodes[2] = gpu_node("n02", vbios=["96.00.A5"] * 3 + ["96.00.89"] + ["96.00.A5"] * 4)
    (finding,) = compare(nodes)["drift"]
    assert (finding.verdict, finding.device) == (Verdict.WARN, "n02")
    assert "gpu3: 96.00.89" in finding.reason


def test_another_gpu_model_may_have_another_vbios() -> None:
    nodes = [gpu_node(f"a{i}", vbios="1") for i in range(5)] + [
        gpu_node(f"b{i}", model="A100", vbios="2") for i in range(2)
    ]
    assert {f.values["what"] for f in compare(nodes)["drift"]} == {"model"}


def test_memory_may_differ_by_what_firmware_keeps() -> None:
    def ram(i: int, gib: float) -> NodeHealth:
        return node(f"n{i}", ("ram", [ok("fine", total_gib=gib)]))

    assert compare([ram(i, 2015.0 + i) for i in range(5)])["drift"][0].verdict is Verdict.PASS
    odd = compare([*(ram(i, 2015.0) for i in range(5)), ram(9, 1007.0)])["drift"]
    assert [(f.verdict, f.device) for f in odd] == [("warn", "n9")]


def test_unlimited_is_a_value_and_not_told_is_none() -> None:
    def lock(i: int, limit: float | None) -> NodeHealth:
        return node(
            f"n{i}", ("memlock", [ok("fine", limit_gib=limit)]), ("gpu_driver", [ok("fine", cuda=None, driver="1")])
        )

    (finding,) = compare([lock(0, None), lock(1, None), lock(2, 0.5)])["drift"]
    assert finding.reason == "locked-memory limit 0.5 GiB; 2 of 3 nodes have unlimited"


def test_a_check_that_skips_on_one_node_alone_is_told() -> None:
    nodes = [node(f"n{i}", ("ib_ports", [ok("8 ports", ports=8)])) for i in range(4)]
    nodes.append(node("n4", ("ib_ports", [skip("no InfiniBand here", proof="no device")])))
    (finding,) = compare(nodes)["drift"]
    assert (finding.verdict, finding.device) == (Verdict.WARN, "n4")


def test_a_slow_gpu_is_named_with_how_far_it_is() -> None:
    nodes = fleet(bf16_tflops=[780.0, 781, 779, 776, 783, 780, 778, 782])
    slow = [780.0, 781, 779, 776, 783, 590.0, 778, 782]
    nodes[4] = gpu_node("n04", bf16_tflops=slow)
    (finding,) = compare(nodes)["peers"]
    assert (finding.verdict, finding.device, finding.values["on"]) == (Verdict.FAIL, "n04", "gpu5")
    assert "24% below" in finding.reason


@pytest.mark.parametrize(("value", "verdict"), [(745.0, "pass"), (700.0, "warn"), (600.0, "fail"), (900.0, "pass")])
def test_only_what_is_far_and_slow_counts(value: float, verdict: str) -> None:
    nodes = fleet(5, bf16_tflops=780.0)
    nodes[0] = gpu_node("n00", bf16_tflops=[780.0] * 7 + [value])
    assert [f.verdict for f in compare(nodes)["peers"]] == [verdict]


def test_a_hot_node_warns_and_a_cool_one_does_not() -> None:
    nodes = fleet(5, celsius=35.0)
    assert compare([*nodes, gpu_node("hot", celsius=61.0)])["peers"][0].device == "hot"
    assert compare([*nodes, gpu_node("cool", celsius=22.0)])["peers"][0].verdict is Verdict.PASS


def test_four_nodes_are_too_few_for_peers() -> None:
    nodes = fleet(4, bf16_tflops=780.0)
    nodes[0] = gpu_node("n00", bf16_tflops=100.0)
    assert [f.verdict for f in compare(nodes)["peers"]] == [Verdict.SKIP]


def test_a_gpu_that_computes_other_bits_fails() -> None:
    nodes = fleet(2, work={"gemm": {"digest": "aa"}})
    nodes[1] = gpu_node("n01", work=[{"gemm": {"digest": "ab" if i == 6 else "aa"}} for i in range(8)])
    (finding,) = compare(nodes)["digests"]
    assert (finding.verdict, finding.device, finding.values["on"]) == (Verdict.FAIL, "n01", "gpu6")


def test_other_software_may_compute_other_bits() -> None:
    nodes = [gpu_node("a", driver="1", digest="x"), gpu_node("b", driver="2", digest="y")]
    assert [f.verdict for f in compare(nodes)["digests"]] == [Verdict.PASS]


def test_two_gpus_that_differ_fail_without_blame() -> None:
    (finding,) = compare([gpu_node("a", gpus=1, digest="x"), gpu_node("b", gpus=1, digest="y")])["digests"]
    assert (finding.verdict, finding.device) == (Verdict.FAIL, None)


def test_the_order_of_answers_changes_nothing_and_all_is_json() -> None:
    nodes = fleet(6, celsius=35.0, vbios="1")
    nodes[1] = gpu_node("n01", driver="1", celsius=80.0, vbios=["1", "2", *["1"] * 6])
    nodes[5] = gpu_node("n05", driver="2")
    first, again = _cluster.compare(nodes), _cluster.compare(nodes[::-1])
    assert first == again
    json.dumps([dict(f.values) for result in first for f in result.findings], allow_nan=False)
