"""Between nodes: the one that differs is named, equals are left in peace, and a tie blames nobody."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from trainmaster.checks.fabric import nccl_env
from trainmaster.cluster.health import compare as _cluster
from trainmaster.cluster.health import diff
from trainmaster.core.expect import Expect
from trainmaster.core.health import ClusterHealth, NodeHealth, Silent
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
    assert finding.reason == "locked-memory limit 512 MiB; 2 of 3 nodes have unlimited"


def test_a_check_that_skips_on_one_node_alone_is_told() -> None:
    nodes = [node(f"n{i}", ("ib_ports", [ok("8 ports", ports=8)])) for i in range(4)]
    nodes.append(node("n4", ("ib_ports", [skip("no InfiniBand here", proof="no device")])))
    (finding,) = compare(nodes)["drift"]
    assert (finding.verdict, finding.device) == (Verdict.FAIL, "n4")
    assert finding.reason == "fabric ports 0; 4 of 5 nodes with no GPU have 8"


def test_a_check_of_another_kind_that_skips_on_one_node_alone_warns() -> None:
    nodes = [node(f"n{i}", ("dcgm", [ok("passed")])) for i in range(4)]
    nodes.append(node("n4", ("dcgm", [skip("DCGM is not installed", proof="no dcgmi")])))
    (finding,) = compare(nodes)["drift"]
    assert (finding.verdict, finding.device) == (Verdict.WARN, "n4")
    (finding,) = compare([nodes[0], nodes[4]])["drift"]
    assert (finding.verdict, finding.device) == (Verdict.WARN, None)
    assert "none has a majority" in finding.reason


def test_one_machine_under_two_names_is_named() -> None:
    one = gpu_node("a")
    (finding,) = compare([one, replace(one, node="b"), gpu_node("c")])["drift"]
    assert (finding.verdict, finding.device) == (Verdict.WARN, None)
    assert "a, b report the same GPU a-gpu0" in finding.reason


def without_gpus(name: str) -> NodeHealth:
    none = skip("no NVIDIA GPU on this machine and none expected", proof="PCI bus: 0 of 14 devices are 10de")
    return node(name, ("gpu_count", [none]), ("gpu_driver", [none]), ("gpu_rates", [none]))


@pytest.mark.parametrize(
    ("having", "lacking", "verdict"), [(2, 1, "fail"), (7, 1, "fail"), (1, 1, "warn"), (3, 3, "warn")]
)
def test_a_node_without_gpus_among_others_is_no_pass(having: int, lacking: int, verdict: str) -> None:
    nodes = [*fleet(having), *(without_gpus(f"x{i}") for i in range(lacking))]
    (finding,) = [f for f in compare(nodes)["drift"] if "GPU count" in f.reason]
    assert finding.verdict == verdict
    assert finding.device == ("x0" if verdict == "fail" else None)
    assert ("GPU count 0" in finding.reason) if verdict == "fail" else ("none has a majority" in finding.reason)


def fabric_node(name: str, ports: int, *, efa: int = 0, stated: bool = False) -> NodeHealth:
    """Eight GPUs, and ports as ib_ports reports them: with `stated` the first finding has their number."""
    found = [ok("up, 400 Gb/s", device=f"mlx5_{i}", rate_gbps=400.0) for i in range(ports)]
    if stated and ports:
        found.insert(0, ok("all are up", ports=ports))
    amazon = [ok(f"{efa} devices", devices=[f"rdmap{i}s0" for i in range(efa)])]
    none = [skip("none here and none expected", proof="the PCI bus shows none")]
    made = gpu_node(name)
    extra = node(name, ("ib_ports", found or none), ("efa", amazon if efa else none))
    return replace(made, planned=made.planned + extra.planned, results=made.results + extra.results)


@pytest.mark.parametrize("stated", [False, True])
@pytest.mark.parametrize(("counts", "verdict", "device"), [
    ((8, 8, 8, 7), "fail", "n3"), ((8, 8, 8, 1), "fail", "n3"), ((8, 8, 0), "fail", "n2"), ((8, 0), "warn", None),
    ((8, 7), "warn", None), ((8, 8, 10), "warn", "n2"), ((8, 8, 8, 8), "pass", None), ((0, 0), "pass", None),
])  # fmt: skip
def test_the_number_of_fabric_ports_is_compared(
    counts: tuple[int, ...], verdict: str, device: str | None, stated: bool
) -> None:
    nodes = [fabric_node(f"n{i}", count, stated=stated) for i, count in enumerate(counts)]
    assert [(f.verdict, f.device) for f in compare(nodes)["drift"]] == [(verdict, device)]


@pytest.mark.parametrize(("counts", "verdict", "device"), [
    ((32, 32, 31), "fail", "n2"), ((32, 32, 0), "fail", "n2"), ((32, 0), "warn", None), ((32, 32), "pass", None),
])  # fmt: skip
def test_the_number_of_efa_devices_is_compared(counts: tuple[int, ...], verdict: str, device: str | None) -> None:
    nodes = [fabric_node(f"n{i}", 0, efa=count) for i, count in enumerate(counts)]
    assert [(f.verdict, f.device) for f in compare(nodes)["drift"]] == [(verdict, device)]


def test_an_adapter_given_to_a_virtual_machine_is_no_port() -> None:
    nodes = [fabric_node(f"n{i}", 8) for i in range(3)]
    given = skip("passed through to a virtual machine", proof="DRIVER=vfio-pci", device="0000:5d:00.1")
    results = tuple(replace(r, findings=(*r.findings, given)) if r.check == "ib_ports" else r for r in nodes[2].results)
    assert compare([*nodes[:2], replace(nodes[2], results=results)])["drift"][0].verdict is Verdict.PASS


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


def slow_gpus(values: list[float]) -> list[NodeHealth]:
    return [gpu_node(f"n{i}", gpus=1, bf16_tflops=value) for i, value in enumerate(values)]


@pytest.mark.parametrize(("values", "named"), [
    ([800, 800, 800, 80, 80, 80], ["n3", "n4", "n5"]),  # the MAD is as large as the fault
    ([800, 800, 80, 80, 80, 80], ["n2", "n3", "n4", "n5"]),  # most are slow
    ([800, 810, 805, 700, 690, 640], ["n5"]),
    ([800, 790, 810, 80, 85], ["n3", "n4"]),
    ([800, 800, 800, 80], ["n3"]),
    ([800, 800, 80], ["n2"]),
])  # fmt: skip
def test_slow_nodes_fail_however_many_they_are(values: list[float], named: list[str]) -> None:
    found = compare(slow_gpus(values))["peers"]
    assert sorted(str(f.device) for f in found if f.verdict is Verdict.FAIL) == named


@pytest.mark.parametrize("values", [[800, 80], [800, 80, 80], [800, 810, 805, 700, 690, 680]])
def test_numbers_that_scatter_without_a_majority_warn_and_blame_nobody(values: list[float]) -> None:
    (finding,) = compare(slow_gpus(values))["peers"]
    assert (finding.verdict, finding.device) == (Verdict.WARN, None)
    assert "none has a majority" in finding.reason


def test_a_path_that_is_longer_on_every_node_is_no_outlier() -> None:
    nodes = fleet(6, h2d_gbps=[55.0] * 4 + [40.0] * 4)
    assert [f.verdict for f in compare(nodes)["peers"]] == [Verdict.PASS]
    nodes[0] = gpu_node("n00", h2d_gbps=[55.0] * 4 + [40.0] * 3 + [20.0])
    (finding,) = compare(nodes)["peers"]
    assert (finding.verdict, finding.device, finding.values["on"]) == (Verdict.FAIL, "n00", "gpu7")


@pytest.mark.parametrize("count", [2, 3, 4, 5, 16])
def test_healthy_scatter_is_no_outlier(count: int) -> None:
    nodes = [gpu_node(f"n{i:02}", bf16_tflops=780.0 + 3 * (i % 5), celsius=30.0 + i % 9) for i in range(count)]
    assert [f.verdict for f in compare(nodes)["peers"]] == [Verdict.PASS]


def test_a_node_that_needs_more_power_for_the_same_work_warns() -> None:
    nodes = fleet(5, bf16_gflops_per_w=1100.0)
    (finding,) = compare([*nodes, gpu_node("n90", gpus=1, bf16_gflops_per_w=800.0)])["peers"]
    assert (finding.verdict, finding.device) == (Verdict.WARN, "n90")
    assert "GFLOPS/W" in finding.reason


def test_half_of_the_nodes_hot_are_named() -> None:
    nodes = [gpu_node(f"n{i}", gpus=1, celsius=35.0 if i < 3 else 80.0) for i in range(6)]
    assert [(f.verdict, f.device) for f in compare(nodes)["peers"]] == [("warn", f"n{i}") for i in (3, 4, 5)]


def test_numbers_of_one_node_have_no_peers() -> None:
    assert [f.verdict for f in compare([gpu_node("a", bf16_tflops=1.0), gpu_node("b")])["peers"]] == [Verdict.SKIP]


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


def test_a_limit_of_kibibytes_is_written_as_such_and_the_action_names_it() -> None:
    nodes = [
        NodeHealth(
            node=f"n{number}", level=1, planned=("memlock",),
            results=(CheckResult(check="memlock", findings=(ok("", limit_gib=gib),), took_s=0.0),),
        )
        for number, gib in enumerate((2.0**-14, 8.0, 8.0, 8.0))
    ]  # fmt: skip
    (finding,) = compare(nodes)["drift"]
    assert finding.device == "n0" and "64 KiB" in finding.reason and "8 GiB" in finding.reason
    assert finding.action == "set the locked-memory limit of this node as on the others"


def test_a_silent_node_is_one_change() -> None:
    results = tuple(CheckResult(check=f"c{number}", findings=(ok("fine"),), took_s=0.0) for number in range(50))
    node = NodeHealth(node="n1", level=1, planned=(), results=results)
    silent = Silent(node="n1", verdict=Verdict.ERROR, reason="no answer", action="look")
    up = ClusterHealth(asked=("n1",), nodes=(node,), silent=(), cluster=())
    down = ClusterHealth(asked=("n1",), nodes=(), silent=(silent,), cluster=())
    assert [(change.kind, change.check) for change in diff.compare(up, down)] == [("new", "answer")]
    assert [(change.kind, change.check) for change in diff.compare(down, up)] == [("gone", "answer")]


def nccl_node(name: str, **settings: str) -> NodeHealth:
    """A node of two GPUs with these variables, judged by the check itself."""
    set_here = {
        variable: nccl_env.Setting(value=value, where="the environment") for variable, value in settings.items()
    }
    setup = nccl_env.NcclSetup(settings=set_here, gpus=2, ports=("mlx5_0:1",), efa=0, topology=False)
    return node(name, ("nccl_env", nccl_env.judge(setup, Expect())))


@pytest.mark.parametrize(
    ("one", "others", "says"),
    [
        ({"NCCL_IB_DISABLE": "1"}, {}, "NCCL_IB_DISABLE=1"),  # harmful on its node too
        ({"NCCL_DEBUG": "INFO", "NCCL_NET": "IB"}, {"NCCL_DEBUG": "INFO"}, "NCCL_DEBUG=INFO, NCCL_NET=IB"),
        ({}, {"NCCL_IB_HCA": "mlx5"}, "none set"),
        ({"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}, {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}, "NCCL_PROTO=LL"),
    ],
)
def test_variables_of_nccl_that_differ_are_named_with_their_node(
    one: dict[str, str], others: dict[str, str], says: str
) -> None:
    (finding,) = compare([nccl_node("n0", **one), *(nccl_node(f"n{i}", **others) for i in range(1, 4))])["drift"]
    assert (finding.verdict, finding.device) == (Verdict.WARN, "n0")
    assert says in finding.reason
    assert finding.action == "set the variables of NCCL of this node as on the others"
    (equal,) = compare([nccl_node(f"n{i}", **one) for i in range(4)])["drift"]
    assert equal.verdict is Verdict.PASS
