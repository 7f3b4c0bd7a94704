"""Collective benchmarks: bandwidth, latency, data verification, proof of transport, hang attribution.

    measure ─▶ launch ─▶ N × rank ─▶ progress (two files each) ─▶ gather ─▶ rows ─┐
                  └─ hang: the rank that blocks the others                        ├─▶ judge ─▶ Report
                                               NCCL's log ─▶ transport ─▶ proof ──┘

Under torchrun, Slurm or MPI each process already is a rank: `launch_nodes.take_part`.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainmaster.bench import limits
from trainmaster.bench.collectives.gather import RunOutcome
from trainmaster.bench.collectives.judge import judge
from trainmaster.bench.collectives.launch import PROGRAM, launch
from trainmaster.bench.collectives.result import Report, Row
from trainmaster.bench.collectives.sweep import COLLECTIVES, Backend, Sweep
from trainmaster.bench.collectives.transport import Expected, Proof, prove_gloo, prove_nccl, read_logs
from trainmaster.core.errors import MissingExtra, UsageError
from trainmaster.node.parse.nccl_debug import NcclLog, Transport

__all__ = ["COLLECTIVES", "Report", "Row", "Sweep", "measure", "report"]


def measure(
    sweep: Sweep,
    *,
    folder: Path | None = None,
    expected: Expected | None = None,
    least_gbps: float | None = None,
    on_row: Callable[[Row], None] = lambda _: None,
    program: Sequence[str] = PROGRAM,
    env: Mapping[str, str] | None = None,
) -> Report:
    """Run the sweep on this machine and judge it. `folder` keeps every rank's progress, output and NCCL log.

    `expected` is the required transport, `least_gbps` the caller's own floor at the largest size; `on_row` gets each
    row as soon as every rank has finished it.
    """
    sweep.checked()
    backend, processes = choose(sweep)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trainmaster-bandwidth-") as own:
        where = folder if folder is not None else Path(own)
        outcome = launch(sweep, backend, processes, where, on_row=on_row, program=program, env=env)
        log = read_logs(where.glob("nccl-*.log")) if backend == "nccl" else None
    return report(
        sweep,
        outcome,
        backend=backend,
        world=processes,
        nodes=1,
        log=log,
        expected=expected,
        least_gbps=least_gbps,
        took_s=time.monotonic() - begun,
    )


def choose(sweep: Sweep) -> tuple[Backend, int]:
    """Backend and number of ranks of this machine; UsageError where they cannot work."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("measuring collectives", "train")
    if sweep.backend == "gloo":
        return "gloo", sweep.processes or 2
    import torch

    gpus = torch.cuda.device_count()
    if sweep.backend is None and not gpus:
        return "gloo", sweep.processes or 2
    if not gpus:
        raise UsageError("--backend nccl: torch sees no GPU here; leave it out, or take gloo")
    processes = sweep.processes or gpus
    if processes > gpus:
        raise UsageError(f"--processes {processes}: NCCL wants a GPU for each rank, and torch sees {gpus}")
    if processes == 1 and sweep.processes is None:
        raise UsageError(
            "one GPU has no peer; --backend gloo --processes 2 measures the CPU side, and "
            "--processes 1 runs NCCL alone, without a verdict on speed"
        )
    return "nccl", processes


def report(
    sweep: Sweep,
    outcome: RunOutcome,
    *,
    backend: Backend,
    world: int,
    nodes: int,
    log: NcclLog | None,
    expected: Expected | None,
    least_gbps: float | None,
    took_s: float,
) -> Report:
    """The judged report of the ranks' measurements."""
    proof = prove_gloo(expected, nodes) if backend == "gloo" else prove_nccl(log, expected, nodes=nodes, world=world)
    measured = Report(
        sweep=sweep,
        backend=backend,
        world=world,
        nodes=nodes,
        members=outcome.members,
        rows=outcome.rows,
        partial=outcome.partial,
        lost=outcome.lost,
        transport=proof.words,
        notes=outcome.notes,
        timings=outcome.timings,
        took_s=took_s,
    )
    keys = _keys(measured, proof, log)
    results = judge(outcome, world=world, nodes=nodes, proof=proof, keys=keys, least_gbps=least_gbps)
    return replace(measured, results=results)


def _keys(measured: Report, proof: Proof, log: NcclLog | None) -> dict[str, limits.Key]:
    """Keys of applicable baselines; none on CPUs, on mixed GPUs, and where the fabric is unproven."""
    if measured.gpu is None or proof.fabric is None or measured.world % measured.nodes:
        return {}
    in_switch = log is not None and Transport.COLLNET in log.transports()
    return {
        name: limits.Key(
            gpu=limits.gpu_model(measured.gpu),
            nodes=measured.nodes,
            gpus_per_node=measured.world // measured.nodes,
            fabric=proof.fabric,
            collective=name,
            algorithm=limits.algorithm(os.environ, in_switch=in_switch),
        )
        for name in measured.sweep.collectives
    }
