"""Acceptance test by training: a ResNet or a Transformer on every GPU, with verdicts on speed and on every bit.

`run` starts the ranks of this machine, or takes part as one rank of another launcher. The result is `results.json`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from trainmaster.bench.accept.options import Options
from trainmaster.core.errors import MissingExtra, UsageError
from trainmaster.core.results import judge_overall
from trainmaster.node.ranks import detect


def run(options: Options, *, env: Mapping[str, str], show: Callable[[str], None]) -> dict[str, Any] | None:
    """The document of the run; None on ranks other than 0 of another launcher."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("acceptance tests", "train")
    options.checked()
    ranks = detect(env)
    if ranks.launcher == "single":
        return _local(options, show)
    if options.processes is not None:
        raise UsageError(f"--processes: {ranks.launcher} has started the ranks already; leave it out")
    from trainmaster.bench.accept import rank
    from trainmaster.train.parallel.rank_info import find_rank_info

    info = find_rank_info(ranks)
    records = rank.run(options, info, show=show if info.rank == 0 else lambda _: None)
    return _document(options, records) if info.rank == 0 else None


def _local(options: Options, show: Callable[[str], None]) -> dict[str, Any]:
    import torch

    from trainmaster.bench.accept import judge, launch
    from trainmaster.core import schema

    processes = options.processes or torch.cuda.device_count() or 1
    if options.fault is not None and options.fault.rank >= processes:
        raise UsageError(f"--inject: there is no rank {options.fault.rank}; there are {processes}")
    try:
        records = launch.launch(options, processes, show=show)
    except launch.RankLost as lost:
        checks = judge.judge_lost(lost.lost)
        overall = judge_overall(checks, planned=judge.CHECKS)
        return {
            "v": 1, "model": options.model, "world_size": processes, "overall": str(overall), "exit_code": 1,
            "checks": [schema.to_plain(check) for check in checks], "options": schema.to_plain(options),
        }  # fmt: skip
    return _document(options, records)


def _document(options: Options, records: Any) -> dict[str, Any]:
    from trainmaster.bench.accept import judge, results, workload

    flops = workload.flops_per_sample(options)
    checks = judge.judge(options, records, flops=flops)
    overall = judge_overall(checks, planned=judge.CHECKS)
    return results.build(options, records, checks, overall, flops=flops)
