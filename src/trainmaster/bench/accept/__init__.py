"""Acceptance test by training: a ResNet or a Transformer on every GPU, with verdicts on speed and on every bit.

`run` starts the ranks of this machine, or those of this node of a job, or takes part as one rank of another launcher.
The result is `results.json`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainmaster.bench.accept import identity
from trainmaster.bench.accept.options import Options
from trainmaster.core.errors import MissingExtra, TrainmasterError, UsageError
from trainmaster.core.results import judge_overall
from trainmaster.node.ranks import Ranks

if TYPE_CHECKING:
    from trainmaster.bench.accept.record import RankRecord


def run(options: Options, *, env: Mapping[str, str], show: Callable[[str], None]) -> dict[str, Any] | None:
    """The document of the run; None on ranks and nodes other than the first of another launcher."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("the acceptance test", "train")
    options.checked()
    ranks = identity.find_ranks(env)
    if ranks.launcher != "single" and ranks.rank is not None and options.processes is not None:
        raise UsageError(f"--processes: {ranks.launcher} has started the ranks already; leave it out")
    if ranks.rank is None:
        ranks = identity.complete(ranks, _processes(options, ranks))
    if ranks.launcher == "single" or ranks.rank is None:
        return _launch(options, ranks, show)
    from trainmaster.bench.accept import rank

    info = identity.find_info(env, ranks)
    shown = show if info.rank == 0 else lambda _: None
    records = rank.run(options, info, show=shown, machine_unknown=identity.machine_unknown(env))
    return _document(options, records) if info.rank == 0 else None


def count_gpus() -> int:
    """GPUs that torch sees on this machine."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("the acceptance test", "train")
    import torch

    return torch.cuda.device_count()


def _launch(options: Options, ranks: Ranks, show: Callable[[str], None]) -> dict[str, Any] | None:
    """Start the ranks of this machine: all of the run, or those of one node of it."""
    from trainmaster.bench.accept import judge, launch, results

    processes = _processes(options, ranks)
    world = processes * ranks.nodes
    if options.fault is not None and options.fault.rank >= world:
        raise UsageError(f"--inject: there is no rank {options.fault.rank}; there are {world}")
    address, port = ranks.master_addr, ranks.master_port
    master = (address, port) if ranks.nodes > 1 and address is not None and port is not None else None
    node = launch.Node(number=ranks.node_rank, nodes=ranks.nodes, master=master)
    try:
        records = launch.launch(options, processes, show=show, node=node)
    except launch.RankLost as lost:
        if node.number:
            raise TrainmasterError(f"node {node.number}: {lost}") from None
        checks = judge.judge_lost(lost.lost)
        return results.build_lost(options, checks, world=world)
    return _document(options, records) if records is not None else None


def _processes(options: Options, ranks: Ranks) -> int:
    """Ranks of this machine: as asked for, as the launcher states, one per GPU, or one."""
    import torch

    stated = None if ranks.launcher == "single" else ranks.local_world_size
    gpus = 0 if options.backend == "gloo" else torch.cuda.device_count()
    return options.processes or stated or gpus or 1


def _document(options: Options, records: Sequence[RankRecord]) -> dict[str, Any]:
    from trainmaster.bench.accept import judge, results, workload

    flops = workload.flops_per_sample(options)
    checks = judge.judge(options, records, flops=flops)
    overall = judge_overall(checks, planned=judge.CHECKS)
    document = results.build(options, records, checks, overall, flops=flops)
    return {**document, "transport": _transport(options, records)}


def _transport(options: Options, records: Sequence[RankRecord]) -> str | None:
    """Transports in NCCL's logs of the ranks that share a folder with rank 0; None without a log."""
    from trainmaster.bench.collectives.transport import prove_nccl, read_logs

    logs = list(Path(options.log_dir).glob("nccl-*.log")) if options.log_dir is not None else []
    if not logs or records[0].backend != "nccl" or len(records) == 1:
        return None
    nodes = len({record.node for record in records})
    return prove_nccl(read_logs(logs), None, nodes=nodes, world=len(records)).words
