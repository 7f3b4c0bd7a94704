"""One node in `health_check_metrics.json`, and the summary shared by node and cluster.

Which finding fills a field, each check states (METRICS). Only results that are no check of a node are named here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from trainmaster.checks import facts, registry
from trainmaster.core.results import Overall, Verdict
from trainmaster.report.health import curves, sanitise
from trainmaster.report.health.view import BAD, Node, Row, View, worst

NOT_MEASURED = "NOT_MEASURED"
_WORDS = {Verdict.PASS: "PASS", Verdict.WARN: "WARN", Verdict.FAIL: "FAIL", Verdict.ERROR: "INCOMPLETE"}
_KNOWN = {Verdict.PASS: True, Verdict.WARN: True, Verdict.FAIL: False}
_JOB, _PING, _TESTS = "sagemaker_job", "efa_communication", "nccl_tests"  # results of a SageMaker job
# Results that are no check of a node and belong to a test, by how their names begin.
_BESIDE = {"efa_network": (_PING,), "nccl_communication": (_TESTS, "collective")}


def describe_node(view: View, node: Node) -> dict[str, Any]:
    """All sections of one node."""
    rows = list(node.rows)
    heard = node.heard
    job = _job(rows)
    between = [row for row in view.cluster if row.node is None]  # collectives over all nodes
    return {
        "timestamp": sanitise.line(heard.started_at) or None if heard else None,
        "node_info": {
            "world_size": _number(job, "world_size"),
            "rank": _number(job, "rank"),
            "local_rank": _number(job, "local_rank"),
            "hostname": node.name,
            "current_host": node.name,
            "host_rank": node.index,
            "host_count": len(view.nodes),
            "gpus_per_host": gpus_expected(node),
        },
        "summary": summarise(node.overall, rows, [issue_text(row) for row in bad_rows(rows)], between=between),
        "gpu": _gpus(rows),
        "system": {
            "memory": _room(rows, "system.memory", "available_gb"),
            "disk": _room(rows, "system.disk", "free_gb"),
            "cpu": {"usage_percent": _usage(rows, job), "count": _value(rows, "system.cpu.count")},
        },
        "network": _network(rows),
        "nccl": _nccl(rows, [*curves.find(between), *curves.find(rows)], job),
        "dcgm": _dcgm(rows, job),
    }


def gpus_expected(node: Node) -> int | None:
    count = _value(node.rows, "node_info.gpus_per_host")
    if count is None and node.heard is not None:
        count = sanitise.number(node.heard.expect.get("gpus"))
    return int(count) if count is not None else None


def processes_per_node(node: Node) -> int | None:
    return _number(_job(list(node.rows)), "processes_per_node")


def _gpus(rows: list[Row]) -> dict[str, Any]:
    devices = {row.device for row in rows if row.device and re.fullmatch(r"gpu\d+", row.device)}
    driver = _text(rows, "gpu.driver_version")
    gpus = {}
    for device in sorted(devices, key=lambda name: (len(name), name)):
        of = [row for row in rows if row.device == device]
        total, used = _value(of, "gpu.memory_total_mb"), _value(of, "gpu.memory_used_mb")
        gpus[device.replace("gpu", "gpu_")] = {
            "name": _text(of, "gpu.name"),
            "driver_version": driver,
            "memory_total_mb": _mib(total),
            "memory_used_mb": _mib(used),
            "memory_free_mb": _mib(total - used) if total is not None and used is not None else None,
            "temperature_c": _value(of, "gpu.temperature_c"),
            "utilization_percent": _value(of, "gpu.utilization_percent"),
            "power_draw_w": _value(of, "gpu.power_draw_w"),
            "status": _WORDS.get(worst(row.verdict for row in of) or Verdict.SKIP, NOT_MEASURED),
        }
    return gpus


def _room(rows: list[Row], section: str, free_name: str) -> dict[str, float | None]:
    total, free = _value(rows, f"{section}.total_gb"), _value(rows, f"{section}.{free_name}")
    used = round(100 * (total - free) / total, 1) if total and free is not None else None
    return {"total_gb": total, free_name: free, "used_percent": used}


def _network(rows: list[Row]) -> dict[str, Any]:
    measured = [row for row in rows if row.verdict is not Verdict.SKIP]
    plugin = next(_stating(measured, "network.aws_ofi_nccl_plugin.installed"), None)
    devices = next((value for value in _values(measured, "network.efa_providers") if isinstance(value, list)), None)
    efa = worst(row.verdict for row in _stating(measured, "network.efa_available"))
    pinged = [row for row in rows if row.check == _PING]
    ping = next((row.values for row in pinged if row.verdict is not Verdict.SKIP), {})
    return {
        "aws_ofi_nccl_plugin": {
            "installed": _KNOWN.get(plugin.verdict) if plugin else None,
            "path": _text([plugin], "network.aws_ofi_nccl_plugin.path") if plugin else None,
        },
        "efa_available": _KNOWN.get(efa) if efa is not None else None,
        "efa_providers": devices,
        "efa_provider_count": len(devices) if devices is not None else None,
        "efa_communication_test": {
            "success": _KNOWN.get(worst(row.verdict for row in pinged) or Verdict.SKIP),
            "raw_output": _string(ping, "raw_output"),
            "test_role": _string(ping, "test_role"),
            "rank": _number(ping, "rank"),
        },
    }


def _nccl(rows: list[Row], curve_list: list[curves.Curve], job: Mapping[str, Any]) -> dict[str, Any]:
    of = _rows_of_test(rows, "nccl_communication")
    measured = any(row.verdict in (Verdict.PASS, Verdict.WARN, Verdict.FAIL) for row in of)
    installed = job.get("nccl_tests_installed")
    return {
        "nccl_tests_available": installed if isinstance(installed, bool) else measured or None,
        "communication_tests": {
            f"{'single_node' if _is_inside(curve) else 'distributed'}_{curve.collective}": {
                "success": curve.row.verdict in (Verdict.PASS, Verdict.WARN),
                "test_type": curve.collective,
                "processes_tested": curve.ranks,
                "results": [
                    {
                        "size_bytes": point.size_bytes,
                        "bandwidth_gbps": point.gbps,
                        "latency_ms": point.latency_us / 1000 if point.latency_us is not None else None,
                    }
                    for point in curve.points
                ],
                "peak_bandwidth_gbps": curve.peak.gbps,
            }
            for curve in curve_list
        },
    }


def _dcgm(rows: list[Row], job: Mapping[str, Any]) -> dict[str, Any]:
    of = [row for test in ("dcgm_basic", "dcgm_extended") for row in _rows_of_test(rows, test)]
    measured = [row for row in of if row.verdict is not Verdict.SKIP]
    return {
        "dcgm_available": bool(measured) if of else None,
        "diagnostics": {
            "basic": _diagnosis(rows, job, "dcgm_basic"),
            "extended": _diagnosis(rows, job, "dcgm_extended"),
        },
    }


def _diagnosis(all_rows: list[Row], job: Mapping[str, Any], test: str) -> dict[str, Any]:
    rows = _rows_of_test(all_rows, test)
    verdict = worst(row.verdict for row in rows)
    # The longest diagnostic that the job kept the output of.
    names = sorted(_sources(f"summary.test_results.{test}"), key=registry.level_of, reverse=True)
    source = next((name for name in names if f"{name}_raw_output" in job), None)
    kept = job if source is not None else {}
    ids = kept.get("gpu_device_ids") or next(
        (row.values["gpu_device_ids"] for row in rows if "gpu_device_ids" in row.values), None
    )
    return {
        "success": _KNOWN.get(verdict) if verdict else None,
        "parsed_output": {
            "dcgm_version": _first_text(rows, "dcgm_version", "version") or _string(kept, "dcgm_version"),
            "driver_version": _first_text(rows, "driver_version", "driver") or _string(kept, "driver_version"),
            "gpu_device_ids": ids,
            "test_results": kept.get(f"{source}_tests") or {},
            "findings": [
                {
                    "device": row.device,
                    "status": _WORDS.get(row.verdict, "SKIP"),
                    "reason": row.reason,
                    "tests": row.values.get("tests"),
                }
                for row in rows
            ],
            "overall_status": _test(rows),
        },
        "raw_output": _string(kept, f"{source}_raw_output"),
    }


def _usage(rows: list[Row], job: Mapping[str, Any]) -> float | None:
    stated = _value(rows, "system.cpu.usage_percent")
    return stated if stated is not None else sanitise.number(job.get("usage_percent"))


def _job(rows: list[Row]) -> Mapping[str, Any]:
    """Facts of the SageMaker job about this node; empty for a run without one."""
    return next((row.values for row in rows if row.check == _JOB), {})


def _number(values: Mapping[str, Any], name: str) -> int | None:
    number = sanitise.number(values.get(name))
    return int(number) if number is not None else None


def _string(values: Mapping[str, Any], name: str) -> str | None:
    text = values.get(name)
    return text if isinstance(text, str) else None


def _sources(metric: str) -> Mapping[str, str]:
    """Checks that state this field, and the name of the value of each."""
    return facts.read().metrics.get(metric, {})


def _stating(rows: Iterable[Row], metric: str) -> Iterator[Row]:
    """Findings of the checks that state this field."""
    sources = _sources(metric)
    return (row for row in rows if row.check in sources)


def _values(rows: Iterable[Row], metric: str) -> Iterator[Any]:
    sources = _sources(metric)
    return (row.values.get(sources[row.check]) for row in rows if row.check in sources)


def _value(rows: Iterable[Row], metric: str) -> float | None:
    """The first number that a finding has for this field."""
    numbers = (sanitise.number(value) for value in _values(rows, metric))
    return next((number for number in numbers if number is not None), None)


def _text(rows: Iterable[Row], metric: str) -> str | None:
    return next((value for value in _values(rows, metric) if isinstance(value, str)), None)


def _first_text(rows: Iterable[Row], *names: str) -> str | None:
    values = (row.values.get(name) for row in rows for name in names)
    return next((value for value in values if isinstance(value, str)), None)


def _rows_of_test(rows: Iterable[Row], test: str) -> list[Row]:
    """Findings behind a test of the file."""
    checks, beside = _sources(f"summary.test_results.{test}"), _BESIDE.get(test, ())
    return [row for row in rows if row.check in checks or row.check.startswith(beside)]


def _is_inside(curve: curves.Curve) -> bool:
    """Whether its collective ran inside of one node: a check of the node measured it, or the job's nccl-tests."""
    return curve.row.check == _TESTS or curve.row.check in registry.names()


def _mib(gib: float | None) -> int | None:
    mib = sanitise.number(gib * 1024) if gib is not None else None
    return round(mib) if mib is not None else None


def bad_rows(rows: Iterable[Row]) -> list[Row]:
    """Bad rows, the worst first."""
    return sorted((row for row in rows if row.verdict in BAD), key=lambda row: BAD.index(row.verdict))


def issue_text(row: Row) -> str:
    device = f" {row.device}" if row.device else ""
    return f"{_WORDS[row.verdict]} {row.check}{device}: {row.reason}"


def summarise(
    overall: Overall, rows: list[Row], issues: list[str], view: View | None = None, between: Sequence[Row] = ()
) -> dict[str, Any]:
    curve_list = [
        curve for curve in curves.find([*between, *rows]) if "all_reduce" in curve.collective.replace("-", "_")
    ]
    inside = [curve.peak.gbps for curve in curve_list if _is_inside(curve)]
    across = [curve.peak.gbps for curve in curve_list if not _is_inside(curve)]
    if view is not None:
        actions = [action.action for action in view.actions]
    else:
        actions = list(dict.fromkeys(row.action for row in bad_rows(rows) if row.action and row.cause is None))
    return {
        "overall_status": str(overall),
        "test_results": {
            test: _test(_rows_of_test(rows, test))
            for test in ("gpu_detection", "efa_network", "nccl_communication", "dcgm_basic", "dcgm_extended")
        },
        "performance_summary": {
            "distributed_all_reduce_bandwidth_gbps": across[0] if across else None,
            # Of the slowest node: it sets the pace of all.
            "single_node_all_reduce_bandwidth_gbps": min(inside) if inside else None,
        },
        "issues": issues,
        "recommendations": actions,
    }


def _test(rows: Iterable[Row]) -> str:
    verdict = worst(row.verdict for row in rows)
    return _WORDS.get(verdict, NOT_MEASURED) if verdict is not None else NOT_MEASURED
