"""A run according to the environment: own ranks on this machine, or one rank of another launcher."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from trainmaster.bench.collectives import measure
from trainmaster.bench.collectives.result import Report, Row
from trainmaster.bench.collectives.sweep import Sweep
from trainmaster.bench.collectives.transport import Expected
from trainmaster.core import schema
from trainmaster.core.errors import MissingExtra, UsageError
from trainmaster.core.results import exit_code
from trainmaster.node.ranks import detect


def run_sweep(
    sweep: Sweep,
    *,
    env: Mapping[str, str],
    out: Path | None,
    expected: Expected | None,
    least_gbps: float | None,
    on_row: Callable[[Row], None],
) -> Report | int:
    """The report; on ranks other than 0 of another launcher, the exit code that rank 0 decided on."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("measuring collectives", "train")
    sweep.checked()
    ranks = detect(env)
    folder = out / "ranks" if out is not None else None
    if ranks.launcher == "single":
        return measure(sweep, folder=folder, expected=expected, least_gbps=least_gbps, on_row=on_row)
    if sweep.processes is not None:
        raise UsageError(f"--processes: {ranks.launcher} has started the ranks already; leave it out")
    import torch

    from trainmaster.bench.collectives.launch_nodes import take_part
    from trainmaster.train.parallel.rank_info import find_rank_info

    rank_info = find_rank_info(ranks)
    backend = sweep.backend or ("nccl" if torch.cuda.device_count() else "gloo")
    with tempfile.TemporaryDirectory(prefix="trainmaster-bandwidth-") as own:
        where = folder if folder is not None else Path(own)
        where.mkdir(parents=True, exist_ok=True)
        return take_part(
            sweep, rank_info, backend, folder=where, expected=expected, least_gbps=least_gbps, on_row=on_row
        )


def document(report: Report) -> dict[str, object]:
    """The report as JSON, with verdict and exit code."""
    overall = report.overall
    return {**schema.to_plain(report), "overall": str(overall), "exit_code": exit_code(overall)}


def save(report: Report, out: Path) -> None:
    """Write `bandwidth.json` beside the ranks' progress files and logs."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "bandwidth.json").write_text(json.dumps(document(report), indent=2) + "\n", encoding="utf-8")
