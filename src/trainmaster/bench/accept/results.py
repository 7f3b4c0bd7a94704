"""`results.json` of an acceptance run: the fields of the earlier tool, and the measurements of every rank.

`summarise` says the same to people, in the last lines of a container's log.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from trainmaster import __version__
from trainmaster.bench.accept import baselines
from trainmaster.bench.accept.advice import recommend
from trainmaster.bench.accept.judge import CHECKS, ran_unjudged
from trainmaster.bench.accept.options import Options
from trainmaster.bench.accept.record import RankRecord, percentile, repeat_rates, total_s, total_samples
from trainmaster.core import schema
from trainmaster.core.compat import UTC
from trainmaster.core.errors import UsageError
from trainmaster.core.files import open_whole
from trainmaster.core.results import CheckResult, Overall, Verdict, exit_code, judge_overall

_VARIABLES = ("BACKEND", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
_PERCENTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


def build(
    options: Options, records: Sequence[RankRecord], checks: Sequence[CheckResult], overall: Overall, *, flops: int
) -> dict[str, Any]:
    """The document. Throughput counts every sample once: samples of all ranks over the time of the slowest."""
    first = records[0]
    elapsed_s, samples = total_s(records), total_samples(options, records)
    steps = len(first.steps_s)
    step_s, alone_s = _typical(records, "steps_s"), _typical(records, "alone_s")
    many = len(records) > 1
    return {
        "v": 1,
        "model": options.model,
        "world_size": len(records),
        "batch_size_per_gpu": options.batch_size,
        "global_batch_size": options.samples_per_step * len(records),
        "total_time_seconds": elapsed_s,
        "average_step_time_seconds": elapsed_s / steps,
        "throughput_samples_per_second": samples / elapsed_s,
        "total_samples": samples,
        "device": baselines.device_of(records),
        "backend": first.backend,
        "overall": str(overall),
        "exit_code": exit_code(overall),
        "checks": [schema.to_plain(check) for check in checks],
        "precision": first.precision,
        "parameters": first.parameters,
        "nodes": len({record.node for record in records}),
        "compiled": all(record.compiled for record in records),
        "cuda_graph": all(record.graphed for record in records),
        "repeats": [{"throughput_samples_per_second": rate} for rate in repeat_rates(options, records)],
        "flops_per_sample": flops,
        "tflops_per_rank": flops * samples / elapsed_s / len(records) / 1e12,
        "step_seconds_without_exchange": alone_s,
        "communication_share": max(0.0, 1 - alone_s / step_s) if many and step_s > 0 else None,
        "scaling_efficiency": _efficiency(options, records, samples / elapsed_s) if many else None,
        "data_wait_share": _waited(records, elapsed_s),
        "stragglers": _stragglers(checks),
        "baseline": _baseline(options, records),
        "limit_samples_per_second": _limit(checks),
        "recommendations": recommend(options, records),
        "loss_first": finite(first.losses[0]),
        "loss_last": finite(first.losses[-1]),
        "ranks": [_rank(record) for record in records],
        "options": schema.to_plain(options),
        "environment": environment(os.environ),
        "versions": dict(first.versions),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "trainmaster": __version__,
    }


def build_lost(options: Options, checks: Sequence[CheckResult], *, world: int) -> dict[str, Any]:
    """The document of a run that ended before its end: nothing was measured."""
    overall = judge_overall(checks, planned=CHECKS)
    return {
        "v": 1,
        "model": options.model,
        "world_size": world,
        "batch_size_per_gpu": options.batch_size,
        "global_batch_size": options.samples_per_step * world,
        "overall": str(overall),
        "exit_code": exit_code(overall),
        "checks": [schema.to_plain(check) for check in checks],
        "options": schema.to_plain(options),
        "environment": environment(os.environ),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "trainmaster": __version__,
    }


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Variables that change the communication. Only names that are known to hold no secret."""
    return {name: env[name] for name in sorted(env) if name in _VARIABLES or name.startswith("NCCL_")}


def _baseline(options: Options, records: Sequence[RankRecord]) -> dict[str, Any] | None:
    """The baseline that judges, or one that is shown beside the measurement."""
    golden, known = baselines.find_golden(options, records), baselines.find(options, records)
    if golden is not None and not (known and known[0].judges):
        return {"samples_per_s": golden.samples_per_s, "source": golden.source, "judges": True}
    if not (known and known[0].judges) and (scaled := baselines.scale(options, records)) is not None:
        return {"samples_per_s": scaled.samples_per_s, "source": scaled.source, "judges": True}
    if not known:
        return None
    return {"samples_per_s": known[0].samples_per_s, "source": known[0].source, "judges": known[0].judges}


def _limit(checks: Sequence[CheckResult]) -> float | None:
    """Samples/s at the datasheet's peak."""
    values = [finding.values for check in checks if check.check == "accept_throughput" for finding in check.findings]
    limit = values[0].get("limit_samples_per_s") if values else None
    return float(limit) if limit is not None else None


def _efficiency(options: Options, records: Sequence[RankRecord], measured: float) -> float:
    """Throughput together over the sum of what each rank reaches without exchange."""
    alone = sum(options.samples_per_step / median(record.alone_s) for record in records)
    return measured / alone


def _waited(records: Sequence[RankRecord], elapsed_s: float) -> float | None:
    waits = [record.waited_s for record in records if record.waited_s is not None]
    return max(waits) / elapsed_s if waits else None


def _stragglers(checks: Sequence[CheckResult]) -> list[dict[str, Any]]:
    findings = [finding for check in checks if check.check == "accept_stragglers" for finding in check.findings]
    return [
        {
            "rank": int(finding.device.removeprefix("rank")),
            "host": finding.values.get("host"),
            "node": finding.values.get("node"),
        }
        for finding in findings
        if finding.device is not None and finding.verdict in (Verdict.FAIL, Verdict.WARN)
    ]


def percentiles(seconds: Sequence[float]) -> Mapping[str, float]:
    """p50, p95, p99 and the largest, by the nearest rank."""
    return {name: percentile(seconds, share) for name, share in _PERCENTILES.items()} | {"max": max(seconds)}


def finite(value: float) -> float | None:
    """A number that JSON has; None for NaN and infinity."""
    return value if math.isfinite(value) else None


def refuse_folder(path: Path) -> None:
    """UsageError where the document cannot be written there; before the run, whose work would be lost."""
    if path.is_dir():
        raise UsageError(f"--out {path} is a folder: name a file in it, as {path / 'results.json'}")
    for parent in path.absolute().parents:
        if parent.exists():
            if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
                raise UsageError(f"--out {path} cannot be made: {parent} is no folder that this user may write to")
            return


def save(document: Mapping[str, Any], path: Path) -> None:
    """Write the document whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_whole(path, durable=False) as file:
        file.write((json.dumps(document, indent=2, allow_nan=False) + "\n").encode())


def _typical(records: Sequence[RankRecord], name: str) -> float:
    return float(median(median(getattr(record, name)) for record in records))


def _rank(record: RankRecord) -> dict[str, Any]:
    return {
        "rank": record.rank,
        "node": record.node,
        "host": record.host,
        "device": record.device,
        "gpu": record.gpu,
        "step_s": percentiles(record.steps_s),
        "alone_s": percentiles(record.alone_s),
        "elapsed_s": record.elapsed_s,
        "data_wait_s": record.waited_s,
        "data_workers": record.workers,
        "sensors": record.sensors,
        "loss_last": finite(record.losses[-1]),
        "parameters_digest": record.parameters_digest,
        "gradients_digest": record.gradients_digest,
        "memory_bytes": record.memory_bytes,
        "notes": list(record.notes),
    }


def is_unjudged(document: Mapping[str, Any]) -> bool:
    """Whether everything ran and only a baseline to judge the speed by is missing."""
    return ran_unjudged([schema.build(CheckResult, check) for check in document["checks"]])


def summarise(document: Mapping[str, Any]) -> str:
    """Verdict, figures, and what is not a pass with its action; one line each."""
    verdict = f"{document['overall']} (ran, not judged)" if is_unjudged(document) else str(document["overall"])
    lines = ["", f"acceptance test: {verdict}"]
    if "throughput_samples_per_second" in document:
        where = f"{document['nodes']} nodes, {document['world_size']} x {document['device']}"
        lines.append(f"  {document['model']}, batch {document['batch_size_per_gpu']} a rank, {where}")
        speed = f"  {document['throughput_samples_per_second']:,.0f} samples/s"
        baseline = document.get("baseline")
        against = f", baseline {baseline['samples_per_s']:,.0f} ({baseline['source']})" if baseline else ", no baseline"
        lines.append(speed + against)
    for check in document["checks"]:
        for finding in check["findings"]:
            device = f" {finding['device']}" if finding["device"] else ""
            if finding["verdict"] in ("fail", "error", "warn"):
                lines.append(f"  {finding['verdict'].upper()} {check['check']}{device}: {finding['reason']}")
                lines.append(f"    what to do: {finding['action']}")
    passed = [check["check"] for check in document["checks"] if _passes(check)]
    lines.append(f"  passed: {', '.join(passed) or 'nothing'}")
    return "\n".join(lines)


def _passes(check: Mapping[str, Any]) -> bool:
    verdicts = {finding["verdict"] for finding in check["findings"]}
    return "pass" in verdicts and verdicts <= {"pass", "skip"}
