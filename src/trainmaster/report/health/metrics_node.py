"""One node in `health_check_metrics.json`, and the summary shared by node and cluster."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainmaster.core.results import Overall, Verdict
from trainmaster.report.health import curves, sanitise
from trainmaster.report.health.view import BAD, Node, Row, View, worst

NOT_MEASURED = "NOT_MEASURED"
_WORDS = {Verdict.PASS: "PASS", Verdict.WARN: "WARN", Verdict.FAIL: "FAIL", Verdict.ERROR: "INCOMPLETE"}
# Checks behind each test of the file.
_GPU = re.compile(r"gpu_(count|driver|model)$|cuda_init$")
_EFA = re.compile(r"efa")
_NCCL = re.compile(r"nccl(?!_env|_interfaces)|collective")
_DCGM = re.compile(r"dcgm")
_INSIDE = ("nccl", "nccl_tests")  # collectives of one node


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
            "memory": _room(rows, "ram", "available_gb"),
            "disk": _room(rows, "disk_space", "free_gb"),
            "cpu": {
                "usage_percent": _usage(rows, job),
                "count": _value(rows, "cpu", "usable", "count"),
            },
        },
        "network": _network(rows),
        "nccl": _nccl(rows, [*curves.find(between), *curves.find(rows)], job),
        "dcgm": _dcgm(rows, job),
    }


def gpus_expected(node: Node) -> int | None:
    told = _value(list(node.rows), "gpu_count", "expected", "listed")
    if told is None and node.heard is not None:
        told = sanitise.number(node.heard.expect.get("gpus"))
    return int(told) if told is not None else None


def processes_per_node(node: Node) -> int | None:
    return _number(_job(list(node.rows)), "processes_per_node")


def _gpus(rows: list[Row]) -> dict[str, Any]:
    devices = {row.device for row in rows if row.device and re.fullmatch(r"gpu\d+", row.device)}
    driver = _text(rows, "gpu_driver", "driver")
    found = {}
    for device in sorted(devices, key=lambda name: (len(name), name)):
        of = [row for row in rows if row.device == device]
        total, used = _value(of, "gpu_memory", "total_gib"), _value(of, "gpu_memory", "used_gib")
        found[device.replace("gpu", "gpu_")] = {
            "name": _text(of, "gpu_", "model"),
            "driver_version": driver,
            "memory_total_mb": _mib(total),
            "memory_used_mb": _mib(used),
            "memory_free_mb": _mib(total - used) if total is not None and used is not None else None,
            "temperature_c": _value(of, "gpu_temperature", "celsius"),
            "utilization_percent": _value(of, "gpu_utilisation", "percent"),
            "power_draw_w": _value(of, "gpu_power", "draw_w"),
            "status": _WORDS.get(worst(row.verdict for row in of) or Verdict.SKIP, NOT_MEASURED),
        }
    return found


def _room(rows: list[Row], check: str, free_name: str) -> dict[str, float | None]:
    total, free = _value(rows, check, "total_gib"), _value(rows, check, "free_gib")
    used = round(100 * (total - free) / total, 1) if total and free is not None else None
    return {"total_gb": total, free_name: free, "used_percent": used}


def _network(rows: list[Row]) -> dict[str, Any]:
    plugin = next((row for row in rows if row.check == "efa_plugin" and row.verdict is not Verdict.SKIP), None)
    path = plugin.values.get("path") if plugin else None
    efa = [row for row in rows if row.check == "efa" and row.verdict is not Verdict.SKIP]
    devices = next((row.values["devices"] for row in efa if isinstance(row.values.get("devices"), list)), None)
    verdict = worst(row.verdict for row in efa)
    known = {Verdict.PASS: True, Verdict.WARN: True, Verdict.FAIL: False}
    pinged = [row for row in rows if row.check == "efa_communication"]
    ping = next((row.values for row in pinged if row.verdict is not Verdict.SKIP), {})
    return {
        "aws_ofi_nccl_plugin": {
            "installed": known.get(plugin.verdict) if plugin else None,
            "path": path if isinstance(path, str) else None,
        },
        "efa_available": known.get(verdict) if verdict is not None else None,
        "efa_providers": devices,
        "efa_provider_count": len(devices) if devices is not None else None,
        "efa_communication_test": {
            "success": known.get(worst(row.verdict for row in pinged) or Verdict.SKIP),
            "raw_output": _string(ping, "raw_output"),
            "test_role": _string(ping, "test_role"),
            "rank": _number(ping, "rank"),
        },
    }


def _nccl(rows: list[Row], found: list[curves.Curve], job: Mapping[str, Any]) -> dict[str, Any]:
    of = [row for row in rows if _NCCL.match(row.check)]
    ran = any(row.verdict in (Verdict.PASS, Verdict.WARN, Verdict.FAIL) for row in of)
    installed = job.get("nccl_tests_installed")
    return {
        "nccl_tests_available": installed if isinstance(installed, bool) else ran or None,
        "communication_tests": {
            f"{'single_node' if curve.row.check in _INSIDE else 'distributed'}_{curve.collective}": {
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
            for curve in found
        },
    }


def _dcgm(rows: list[Row], job: Mapping[str, Any]) -> dict[str, Any]:
    of = [row for row in rows if _dcgm_level(row) is not None]
    ran = [row for row in of if row.verdict is not Verdict.SKIP]
    return {
        "dcgm_available": bool(ran) if of else None,
        "diagnostics": {
            "basic": _diagnosis([row for row in of if _dcgm_level(row) == 1], job, ("dcgm",)),
            "extended": _diagnosis([row for row in of if _dcgm_level(row) == 2], job, ("dcgm_stress", "dcgm_extended")),
        },
    }


def _diagnosis(rows: list[Row], job: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    verdict = worst(row.verdict for row in rows)
    ran = next((name for name in names if f"{name}_raw_output" in job), names[0])
    told = job if f"{ran}_raw_output" in job else {}
    ids = told.get("gpu_device_ids") or next(
        (row.values["gpu_device_ids"] for row in rows if "gpu_device_ids" in row.values), None
    )
    return {
        "success": {Verdict.PASS: True, Verdict.WARN: True, Verdict.FAIL: False}.get(verdict) if verdict else None,
        "parsed_output": {
            "dcgm_version": _text(rows, "", "dcgm_version", "version") or _string(told, "dcgm_version"),
            "driver_version": _text(rows, "", "driver_version", "driver") or _string(told, "driver_version"),
            "gpu_device_ids": ids,
            "test_results": told.get(f"{ran}_tests") or {},
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
        "raw_output": _string(told, f"{ran}_raw_output"),
    }


def _usage(rows: list[Row], job: Mapping[str, Any]) -> float | None:
    stated = _value(rows, "cpu", "usage_percent")
    return stated if stated is not None else sanitise.number(job.get("usage_percent"))


def _job(rows: list[Row]) -> Mapping[str, Any]:
    """Facts of the SageMaker job about this node; empty for a run without one."""
    return next((row.values for row in rows if row.check == "sagemaker_job"), {})


def _number(values: Mapping[str, Any], name: str) -> int | None:
    found = sanitise.number(values.get(name))
    return int(found) if found is not None else None


def _string(values: Mapping[str, Any], name: str) -> str | None:
    found = values.get(name)
    return found if isinstance(found, str) else None


def _value(rows: list[Row], check: str, *names: str) -> float | None:
    """The first number of one of these names in findings of checks with this prefix."""
    return next(
        (
            value
            for row in rows
            if row.check.startswith(check)
            for name in names
            if (value := sanitise.number(row.values.get(name))) is not None
        ),
        None,
    )


def _text(rows: list[Row], check: str, *names: str) -> str | None:
    return next(
        (
            value
            for row in rows
            if row.check.startswith(check)
            for name in names
            if isinstance(value := row.values.get(name), str)
        ),
        None,
    )


def _mib(gib: float | None) -> int | None:
    found = sanitise.number(gib * 1024) if gib is not None else None
    return round(found) if found is not None else None


def bad_rows(rows: Iterable[Row]) -> list[Row]:
    """Bad rows, the worst first."""
    return sorted((row for row in rows if row.verdict in BAD), key=lambda row: BAD.index(row.verdict))


def issue_text(row: Row) -> str:
    device = f" {row.device}" if row.device else ""
    return f"{_WORDS[row.verdict]} {row.check}{device}: {row.reason}"


def summarise(
    overall: Overall, rows: list[Row], issues: list[str], view: View | None = None, between: Sequence[Row] = ()
) -> dict[str, Any]:
    found = [curve for curve in curves.find([*between, *rows]) if "all_reduce" in curve.collective.replace("-", "_")]
    inside = [curve.peak.gbps for curve in found if curve.row.check in _INSIDE]
    across = [curve.peak.gbps for curve in found if curve.row.check not in _INSIDE]
    if view is not None:
        actions = [one.action for one in view.actions]
    else:
        actions = list(dict.fromkeys(row.action for row in bad_rows(rows) if row.action and row.cause is None))
    return {
        "overall_status": str(overall),
        "test_results": {
            "gpu_detection": _test(row for row in rows if _GPU.match(row.check)),
            "efa_network": _test(row for row in rows if _EFA.match(row.check)),
            "nccl_communication": _test(row for row in rows if _NCCL.match(row.check)),
            "dcgm_basic": _test(row for row in rows if _dcgm_level(row) == 1),
            "dcgm_extended": _test(row for row in rows if _dcgm_level(row) == 2),
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
    found = worst(row.verdict for row in rows)
    return _WORDS.get(found, NOT_MEASURED) if found is not None else NOT_MEASURED


def _dcgm_level(row: Row) -> int | None:
    """1: the short diagnostic (`-r 1`). 2: a longer one. None: not a DCGM check."""
    if not _DCGM.match(row.check):
        return None
    return 1 if row.check == "dcgm" else 2
