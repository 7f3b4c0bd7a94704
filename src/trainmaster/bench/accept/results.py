"""`results.json` of an acceptance run: the fields of the earlier tool, and beside them what every rank measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from trainmaster import __version__
from trainmaster.bench.accept.options import Options
from trainmaster.bench.accept.record import RankRecord
from trainmaster.core import schema
from trainmaster.core.files import open_whole
from trainmaster.core.results import CheckResult, Overall, exit_code

_PERCENTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


def build(
    options: Options,
    records: Sequence[RankRecord],
    checks: Sequence[CheckResult],
    overall: Overall,
    *,
    flops: int,
) -> dict[str, Any]:
    """The document. Throughput counts every sample once: samples of all ranks over the time of the slowest."""
    first = records[0]
    elapsed_s = max(record.elapsed_s for record in records)
    samples = options.batch_size * len(records) * options.active_iterations
    step_s, alone_s = _typical(records, "steps_s"), _typical(records, "alone_s")
    return {
        "v": 1,
        "model": options.model,
        "world_size": len(records),
        "batch_size_per_gpu": options.batch_size,
        "global_batch_size": options.batch_size * len(records),
        "total_time_seconds": elapsed_s,
        "average_step_time_seconds": elapsed_s / options.active_iterations,
        "throughput_samples_per_second": samples / elapsed_s,
        "total_samples": samples,
        "device": first.device,
        "backend": first.backend,
        "overall": str(overall),
        "exit_code": exit_code(overall),
        "checks": [schema.to_plain(check) for check in checks],
        "precision": first.precision,
        "parameters": first.parameters,
        "compiled": all(record.compiled for record in records),
        "cuda_graph": all(record.graphed for record in records),
        "flops_per_sample": flops,
        "tflops_per_rank": flops * samples / elapsed_s / len(records) / 1e12,
        "communication_share": max(0.0, 1 - alone_s / step_s) if len(records) > 1 and step_s > 0 else None,
        "loss_first": finite(first.losses[0]),
        "loss_last": finite(first.losses[-1]),
        "ranks": [_rank(record) for record in records],
        "options": schema.to_plain(options),
        "versions": dict(first.versions),
        "trainmaster": __version__,
    }


def percentiles(seconds: Sequence[float]) -> Mapping[str, float]:
    """p50, p95, p99 and the largest, by the nearest rank."""
    ordered = sorted(seconds)
    found = {name: ordered[max(0, math.ceil(share * len(ordered)) - 1)] for name, share in _PERCENTILES.items()}
    return {**found, "max": ordered[-1]}


def finite(value: float) -> float | None:
    """A number that JSON has; None for NaN and infinity."""
    return value if math.isfinite(value) else None


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
        "loss_last": finite(record.losses[-1]),
        "parameters_digest": record.parameters_digest,
        "gradients_digest": record.gradients_digest,
        "memory_bytes": record.memory_bytes,
        "notes": list(record.notes),
    }
