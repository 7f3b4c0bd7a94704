"""One rank of an acceptance run: warm-up, timed steps, and then the comparisons that find a slow or wrong rank.

Order matters. Parameters are compared while they must be equal; then every rank computes rank 0's batch twice and keeps
its gradients to itself, which must be the same bits twice and on every equal GPU; then steps without any exchange show
how fast each rank is by itself.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainmaster.bench.accept import identity, workload
from trainmaster.bench.accept.digest import digest, flip_bit
from trainmaster.bench.accept.feed import Feed
from trainmaster.bench.accept.options import Options
from trainmaster.bench.accept.record import RankRecord
from trainmaster.bench.accept.sensors import Sampler
from trainmaster.bench.accept.step import Clock, Step
from trainmaster.bench.collectives.launch import NCCL_DEBUG
from trainmaster.bench.collectives.route import lead_gloo
from trainmaster.core.errors import UsageError
from trainmaster.datasets.images import open_images
from trainmaster.node.node_name import host_name
from trainmaster.train.parallel.rank_info import RankInfo
from trainmaster.train.parallel.shard import join

BEGIN, END = "timed steps: begin", "timed steps: end"  # progress lines around each repeat
_DRIVER = Path("/proc/driver/nvidia/version")
_CPU_BATCH = 8
_ON_CPU = "--model resnet18 --image-size 32 --batch-size 4 --warmup-iterations 1 --active-iterations 5"
_ALONE = 30  # steps without exchange, at most
_CALIBRATION = 3  # steps from which the number of steps of a duration is computed


def run(
    options: Options, info: RankInfo, *, show: Callable[[str], None], machine_unknown: bool = False
) -> list[RankRecord]:
    """Take part in the run; the records of all ranks, on every rank."""
    device = pick_device(options, info)
    if device.type == "cuda":
        keep_nccl_log(options, info.rank)
    elif info.nodes > 1 and info.master is not None and not machine_unknown:
        lead_gloo(os.environ, info.master[0])
    if info.world_size > 1:
        join(info, device, timeout_s=options.timeout_s)
    try:
        if machine_unknown:
            info = _find_machine(info, device)
        record = _RankRun(options, info, device, show).measure()
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


def keep_nccl_log(options: Options, rank: int) -> None:
    """NCCL_DEBUG=INFO where the user states nothing else, into a file of this rank."""
    for name, value in NCCL_DEBUG.items():
        os.environ.setdefault(name, value)
    if options.log_dir is not None:
        folder = Path(options.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("NCCL_DEBUG_FILE", str(folder / f"nccl-{rank}.log"))


def _find_machine(info: RankInfo, device: torch.device) -> RankInfo:
    machines: list[Any] = [None] * info.world_size
    dist.all_gather_object(machines, identity.read_machine())
    placed = identity.place(info, machines)
    if device.type == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // placed.local_world_size))
    return placed


@dataclass(slots=True, kw_only=True)
class _Timed:
    """Times and losses of the timed steps."""

    repeats_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


class _RankRun:
    """The measurements of one rank."""

    def __init__(self, options: Options, info: RankInfo, device: torch.device, show: Callable[[str], None]) -> None:
        self._options, self._info, self._device, self._show = options, info, device, show
        self._precision = options.precision or ("bf16" if device.type == "cuda" else "fp32")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self._precision in ("tf32", "bf16")
        torch.backends.cudnn.benchmark = True
        self._model = workload.build_model(options, device)
        batch = workload.synthetic_batch(options, device, rank=info.rank)
        self._step = Step(self._model, batch, options, world=info.world_size, precision=self._precision)
        self._feed = self._open_feed()
        self._fault = options.fault if options.fault is not None and options.fault.rank == info.rank else None

    def _open_feed(self) -> Feed | None:
        if self._options.data_mode == "synthetic":
            return None
        folder, size = Path(self._options.data_dir), self._options.image_size
        images = open_images(self._options.data_mode, folder, image_size=size, show=self._show)
        return Feed(images, self._options, self._device, self._info)

    def measure(self) -> RankRecord:
        options, step = self._options, self._step
        self._show(f"{options.model}: preparing")
        if self._device.type == "cpu" and options.batch_size > _CPU_BATCH:
            self._show(
                f"a step of {options.batch_size} samples can take minutes without a GPU; {_ON_CPU} takes seconds"
            )
        step.prepare()
        self._loop(options.warmup_iterations, name="warm-up")
        count = self._count()
        if self._has("nan"):
            next(self._model.parameters()).detach().fill_(float("nan"))
        if self._has("exit"):
            os._exit(9)
        if self._feed is not None:
            self._feed.waited_s = 0.0
        sampler, timed = Sampler(self._device), _Timed()
        with sampler:
            for _ in range(options.repeats):
                self._repeat(count, timed)
        waited_s = self._feed.waited_s if self._feed is not None else None
        if self._has("flip"):
            flip_bit(next(iter(workload.repeatable(options, self._model))))
        parameters = digest(self._model.parameters())
        first, again = (self._gradients() for _ in range(2))
        self._show("steps without exchange")
        step.set_sync(False)
        alone_s = self._loop(min(count, _ALONE), feed=False)
        cuda = self._device.type == "cuda"
        return RankRecord(
            rank=self._info.rank,
            node=self._info.node_rank,
            host=host_name(),
            device=torch.cuda.get_device_name(self._device) if cuda else "cpu",
            gpu=str(torch.cuda.get_device_properties(self._device).uuid) if cuda else None,
            precision=self._precision,
            backend="nccl" if cuda else "gloo",
            parameters=sum(parameter.numel() for parameter in self._model.parameters()),
            repeats_s=timed.repeats_s,
            steps_s=timed.steps_s,
            alone_s=alone_s,
            losses=timed.losses,
            parameters_digest=parameters,
            gradients_digest=first,
            gradients_again=again,
            memory_bytes=torch.cuda.max_memory_allocated(self._device) if cuda else None,
            compiled=step.compiled,
            graphed=step.graphed,
            waited_s=waited_s,
            workers=self._feed.workers if self._feed is not None else None,
            sensors=sampler.summary(),
            notes=step.notes,
            versions=_versions(self._device),
        )

    def _has(self, kind: str) -> bool:
        return self._fault is not None and self._fault.kind == kind

    def _count(self) -> int:
        """Timed steps of a repeat: the same on all ranks."""
        if self._options.duration_s is None:
            return self._options.active_iterations
        begun = time.perf_counter()
        self._loop(_CALIBRATION)
        _finish(self._device)
        slowest = torch.tensor([(time.perf_counter() - begun) / _CALIBRATION], dtype=torch.float64)
        if self._info.world_size > 1:
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return max(1, math.ceil(self._options.duration_s / float(slowest)))

    def _repeat(self, count: int, timed: _Timed) -> None:
        self._barrier()
        self._show(BEGIN)
        begun = time.perf_counter()
        seconds = self._loop(count, losses=timed.losses, name="active")
        _finish(self._device)
        timed.repeats_s.append(time.perf_counter() - begun)
        self._show(END)
        timed.steps_s += seconds

    def _loop(
        self, count: int, *, losses: list[float] | None = None, name: str | None = None, feed: bool = True
    ) -> list[float]:
        """Run `count` steps; their seconds. Losses stay on the device until the last step is done."""
        step = self._step
        slow = self._fault.share if self._fault is not None and self._fault.kind == "slow" and name != "warm-up" else 0
        clock, kept = Clock(step.device), torch.zeros(count, device=step.device)
        clock.mark()
        for number in range(count):
            begun = time.perf_counter()
            if feed and self._feed is not None:
                step.take(self._feed.next())
            step.run()
            if slow:
                _finish(step.device)
                time.sleep(slow * (time.perf_counter() - begun))
            if losses is not None:
                kept[number] = step.loss
            clock.mark()
            if name is not None:
                self._progress(name, number + 1, count)
        seconds = clock.seconds()
        if losses is not None:
            losses.extend(kept.tolist())
        return seconds

    def _progress(self, name: str, number: int, count: int) -> None:
        if number % max(1, count // 10) == 0 or number == count:
            self._show(f"{name} {number}/{count}")

    def _gradients(self) -> str:
        """Digest of this rank's own gradients of rank 0's batch, computed without compiler, graph or exchange."""
        buckets = self._step.buckets
        kept = buckets.sync, torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
        buckets.sync = False
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        batch = workload.synthetic_batch(self._options, self._device, rank=0).parts(self._options.accumulate)[0]
        buckets.begin()
        with sdpa_kernel([SDPBackend.MATH]):  # the backward pass of the others adds in any order
            loss = workload.loss_of(self._model, batch, autocast=self._precision == "bf16")
            loss.backward()  # type: ignore[no-untyped-call]
        gradients = [
            parameter.grad
            for parameter in workload.repeatable(self._options, self._model)
            if parameter.grad is not None
        ]
        if self._has("flip"):
            flip_bit(gradients[0])
        gradients_digest = digest(gradients)
        buckets.sync, torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = kept
        return gradients_digest

    def _barrier(self) -> None:
        _finish(self._device)
        if self._info.world_size > 1:
            dist.barrier()
        _finish(self._device)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _versions(device: torch.device) -> dict[str, str]:
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    if device.type == "cuda":
        versions["cuda"] = str(torch.version.cuda)
        versions["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        with contextlib.suppress(OSError):
            versions["driver"] = _DRIVER.read_text().splitlines()[0].removeprefix("NVRM version: ")
    return versions
