"""One rank of an acceptance run: warm-up, timed steps, and then what tells a slow or wrong rank from the others.

Order matters. Parameters are compared while they must be equal; then every rank computes rank 0's batch twice and keeps
its gradients to itself, which must be the same bits twice and on every equal GPU; then steps without any exchange show
how fast each rank is by itself.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from trainmaster.bench.accept import workload
from trainmaster.bench.accept.digest import digest, flip_bit
from trainmaster.bench.accept.options import Options
from trainmaster.bench.accept.record import RankRecord
from trainmaster.bench.accept.step import Clock, Step
from trainmaster.core.errors import UsageError
from trainmaster.train.parallel.rank_info import RankInfo
from trainmaster.train.parallel.shard import join

_ALONE = 30  # steps without exchange, at most


def run(options: Options, info: RankInfo, *, show: Callable[[str], None]) -> list[RankRecord]:
    """Take part in the run; the records of all ranks, on every rank."""
    device = pick_device(options, info)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if info.world_size > 1:
        join(info, device, timeout_s=options.timeout_s)
    try:
        record = _measure(options, info, device, backend, show)
        records: list[Any] = [record]
        if info.world_size > 1:
            records = [None] * info.world_size
            dist.all_gather_object(records, record)
        return records
    finally:
        if info.world_size > 1 and sys.exc_info()[0] is None:
            dist.destroy_process_group()


def pick_device(options: Options, info: RankInfo) -> torch.device:
    """The GPU of this rank; the CPU where the machine has none, or where gloo is asked for."""
    count = 0 if options.backend == "gloo" else torch.cuda.device_count()
    if options.backend == "nccl" and not count:
        raise UsageError("--backend nccl: this machine shows no GPU to torch")
    if not count:
        return torch.device("cpu")
    # A container of one rank shows its own GPU alone.
    device = torch.device("cuda", info.local_rank if count > 1 else 0)
    torch.cuda.set_device(device)
    return device


def _measure(
    options: Options, info: RankInfo, device: torch.device, backend: str, show: Callable[[str], None]
) -> RankRecord:
    precision = options.precision or ("bf16" if device.type == "cuda" else "fp32")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision in ("tf32", "bf16")
    torch.backends.cudnn.benchmark = True
    model = workload.build_model(options, device)
    batch = workload.synthetic_batch(options, device, rank=info.rank)
    step = Step(model, batch, options, world=info.world_size, precision=precision)
    show(f"{options.model}: preparing")
    step.prepare()
    fault = options.fault if options.fault is not None and options.fault.rank == info.rank else None
    slow = fault.share if fault is not None and fault.kind == "slow" else 0.0
    _loop(step, options.warmup_iterations, show=_shown(show, "warm-up", options.warmup_iterations))
    if fault is not None and fault.kind == "nan":
        next(model.parameters()).detach().fill_(float("nan"))
    if fault is not None and fault.kind == "exit":
        os._exit(9)
    losses: list[float] = []
    _meet(info, device)
    begun = time.perf_counter()
    steps_s = _loop(
        step,
        options.active_iterations,
        slow=slow,
        losses=losses,
        show=_shown(show, "active", options.active_iterations),
    )
    _finish(device)
    elapsed_s = time.perf_counter() - begun
    if fault is not None and fault.kind == "flip":
        flip_bit(next(iter(workload.repeatable(options, model))))
    parameters = digest(model.parameters())
    first, again = (_gradients(step, options, flip=fault is not None and fault.kind == "flip") for _ in range(2))
    show("steps without exchange")
    step.set_sync(False)
    alone_s = _loop(step, min(options.active_iterations, _ALONE), slow=slow)
    return RankRecord(
        rank=info.rank,
        node=info.node_rank,
        host=socket.gethostname(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        gpu=str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None,
        precision=precision,
        backend=backend,
        parameters=sum(one.numel() for one in model.parameters()),
        elapsed_s=elapsed_s,
        steps_s=steps_s,
        alone_s=alone_s,
        losses=losses,
        parameters_digest=parameters,
        gradients_digest=first,
        gradients_again=again,
        memory_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        compiled=step.compiled,
        graphed=step.graphed,
        notes=step.notes,
        versions=_versions(device),
    )


def _loop(
    step: Step,
    count: int,
    *,
    slow: float = 0.0,
    losses: list[float] | None = None,
    show: Callable[[int], None] = lambda _: None,
) -> list[float]:
    """Run `count` steps; their seconds. Losses stay on the device until the last step is done."""
    clock, kept = Clock(step.device), torch.zeros(count, device=step.device)
    clock.mark()
    for number in range(count):
        begun = time.perf_counter()
        step.run()
        if slow:
            _finish(step.device)
            time.sleep(slow * (time.perf_counter() - begun))
        if losses is not None:
            kept[number] = step.loss
        clock.mark()
        show(number + 1)
    seconds = clock.seconds()
    if losses is not None:
        losses.extend(kept.tolist())
    return seconds


def _gradients(step: Step, options: Options, *, flip: bool) -> str:
    """Digest of this rank's own gradients of rank 0's batch, computed without compiler, graph or exchange."""
    kept = step.buckets.sync, torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    step.buckets.sync = False
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    batch = workload.synthetic_batch(options, step.device, rank=0)
    step.buckets.begin()
    autocast = (options.precision or ("bf16" if step.device.type == "cuda" else "fp32")) == "bf16"
    workload.loss_of(step.model, batch, autocast=autocast).backward()  # type: ignore[no-untyped-call]
    gradients = [one.grad for one in workload.repeatable(options, step.model) if one.grad is not None]
    if flip:
        flip_bit(gradients[0])
    found = digest(gradients)
    step.buckets.sync, torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = kept
    return found


def _meet(info: RankInfo, device: torch.device) -> None:
    _finish(device)
    if info.world_size > 1:
        dist.barrier()
    _finish(device)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _shown(show: Callable[[str], None], what: str, count: int) -> Callable[[int], None]:
    every = max(1, count // 10)

    def each(number: int) -> None:
        if number % every == 0 or number == count:
            show(f"{what} {number}/{count}")

    return each


def _versions(device: torch.device) -> dict[str, str]:
    found = {"torch": torch.__version__, "python": sys.version.split()[0]}
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found
