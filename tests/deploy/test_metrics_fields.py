"""Every field of `health_check_metrics.json` is filled from a recorded node on which its value was measured."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from checks.nodes import efa
from machines import H200, Machine
from trainmaster.bench import nccl_tests
from trainmaster.checks import document
from trainmaster.cluster.sagemaker import job as sagemaker
from trainmaster.cluster.sagemaker import node as sagemaker_node
from trainmaster.core.expect import Expect
from trainmaster.core.health import ClusterHealth
from trainmaster.core.money.prices import Prices, Rate
from trainmaster.core.results import CheckResult, ok
from trainmaster.node.host import Host
from trainmaster.report.health import build
from trainmaster.report.health.metrics import render as render_metrics

SAMPLES = Path(__file__).parents[1] / "node" / "parse" / "samples"
SCHEMA = json.loads((resources.files("trainmaster.report.health") / "metrics.schema.json").read_text())
CHECKS = (
    "cpu disk_space efa efa_plugin gpu_count gpu_driver gpu_memory gpu_model gpu_power gpu_temperature gpu_utilisation "
    "ram dcgm dcgm_extended"
).split()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path / "host", of=H200)
    efa(made, 4)
    healthy = (SAMPLES / "dcgm-4.2-healthy.json").read_text()
    for level in ("1", "2"):
        made.command(f"dcgmi diag -r {level} -j", healthy)
    return made


def table() -> str:
    text = (SAMPLES / "nccl-tests-two-single-nodes.txt").read_text()
    return "\n".join(line[3:] for line in text.splitlines() if line.startswith("0: "))


def measured(machine: Machine) -> dict[str, Any]:
    health = document.measure(machine.host, Expect(), level=2, only=CHECKS, node="algo-1", profile="ml.p5.48xlarge")
    job = sagemaker.read_job(
        {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1", "RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0",
         "LOCAL_WORLD_SIZE": "8"}
    )  # fmt: skip
    facts = sagemaker.describe(job, per_node=8, collectives=True) | sagemaker_node.read_facts(Host(), machine.folder)
    ping = ok("messages arrived", test_role="server", partner="algo-2", rank=0, raw_output="bytes #sent #ack")
    tests = list(nccl_tests.judge(table(), ranks=8).findings)
    report = sagemaker_node.HostReport(host="algo-1", facts=facts, efa=(ping,), nccl=tuple(tests))
    between = ok(
        "fine", collective="all_reduce", ranks=8, busbw_gbps={"1048576": 100.0},
        points=[{"size_bytes": 1048576, "busbw_gbps": 100.0, "latency_us": 20.0}],
    )  # fmt: skip
    results = sagemaker_node.results({"algo-1": report}, {"algo-1": tests})
    cluster = ClusterHealth(
        asked=("algo-1",), nodes=(health,),
        cluster=(*results, CheckResult(check="collective_bandwidth", findings=(between,), took_s=1.0)),
        started_at="2026-03-01T12:00:00+00:00",
    )  # fmt: skip
    cost = Prices(by_profile={"ml.p5.48xlarge": Rate(usd_per_hour=55.04, source="AWS price list")})
    found: dict[str, Any] = json.loads(render_metrics(build(cluster, cost)))
    return found


def nulls(value: Any, path: str = "") -> list[str]:
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in nulls(item, f"{path}.{key}")]
    if isinstance(value, list):
        return [found for number, item in enumerate(value) for found in nulls(item, f"{path}[{number}]")]
    return [path] if value is None else []


def test_no_field_is_null_where_its_value_was_measured(machine: Machine) -> None:
    metrics = measured(machine)
    jsonschema.validate(metrics, SCHEMA)
    fields = {name: metrics[name] for name in ("timestamp", "cluster_info", "cluster_summary", "nodes")}
    empty = [path for path in nulls(fields) if not path.endswith((".latency_ms", ".device", ".tests"))]
    assert empty == []
    node = metrics["nodes"]["node_0"]
    assert node["node_info"]["world_size"] == 8
    basic = node["dcgm"]["diagnostics"]["basic"]
    assert basic["parsed_output"]["dcgm_version"] == "4.2.3"
    assert basic["parsed_output"]["gpu_device_ids"]
    assert "deployment" in basic["parsed_output"]["test_results"]
    assert json.loads(basic["raw_output"])
    assert node["network"]["efa_communication_test"] == {
        "success": True, "raw_output": "bytes #sent #ack", "test_role": "server", "rank": 0,
    }  # fmt: skip
    tests = node["nccl"]["communication_tests"]
    assert tests["distributed_all_reduce"]["results"] == [
        {"size_bytes": 1048576, "bandwidth_gbps": 100.0, "latency_ms": 0.02}
    ]
    assert tests["single_node_all_reduce"]["peak_bandwidth_gbps"] > 400
    summary = metrics["cluster_summary"]["performance_summary"]
    assert summary["distributed_all_reduce_bandwidth_gbps"] == 100.0
    assert summary["single_node_all_reduce_bandwidth_gbps"] == tests["single_node_all_reduce"]["peak_bandwidth_gbps"]
    assert metrics["cost"]["failed_run_usd"] == 440.32


def test_a_plain_check_tells_the_use_of_the_cpus(machine: Machine) -> None:
    health = document.measure(machine.host, Expect(), level=1, only=["cpu", "cpu_load"], node="n1")
    metrics = json.loads(render_metrics(build(ClusterHealth(asked=("n1",), nodes=(health,)))))
    assert metrics["nodes"]["node_0"]["system"]["cpu"] == {"usage_percent": 3.0, "count": 16.0}


def test_a_file_of_another_shape_does_not_validate(machine: Machine) -> None:
    metrics = measured(machine)
    metrics["nodes"]["node_0"]["node_info"]["rank"] = "zero"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(metrics, SCHEMA)
