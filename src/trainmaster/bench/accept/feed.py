"""Batches of real data for one rank: its share of a shuffled data set, read by worker processes, endlessly."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from trainmaster.bench.accept.options import Options
from trainmaster.bench.accept.workload import Batch
from trainmaster.core.errors import DataError
from trainmaster.datasets.images import Images
from trainmaster.train.parallel.rank_info import RankInfo

_SEED = 4321
_PREFETCH = 2  # batches that each worker holds ready; torch's default
_MOST_WORKERS = 8
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (where torch's workers put their batches)


class Feed:
    """Batches on the device. `waited_s` is the time that the rank waited for the CPU to have one."""

    def __init__(self, images: Images, options: Options, device: torch.device, info: RankInfo) -> None:
        count = options.samples_per_step
        if len(images) < count * info.world_size:
            raise DataError(
                f"--data-mode {options.data_mode}: {len(images):,} images are fewer than a step of {info.world_size} "
                f"ranks takes ({count * info.world_size:,}); use a smaller --batch-size"
            )
        if images.classes > options.num_classes:
            raise DataError(f"--num-classes {options.num_classes}: {options.data_mode} has {images.classes} classes")
        workers = choose_workers(options, images, info)
        check_shared_memory(images, options, workers * info.local_world_size)
        self.waited_s = 0.0
        self.workers = workers
        self._images, self._pixels, self._device = images, options.pixels, device
        self._mean, self._deviation = (
            torch.tensor(values, device=device).view(1, -1, 1, 1) for values in (images.mean, images.deviation)
        )
        self._batches: Iterator[Any] = iter(
            DataLoader(
                _Guarded(images),  # type: ignore[arg-type]
                batch_sampler=_Shares(len(images), count, info.rank, info.world_size),
                collate_fn=_unchanged,
                num_workers=workers,
                prefetch_factor=_PREFETCH if workers else None,
                pin_memory=device.type == "cuda",
            )
        )

    def next(self) -> Batch:
        """The next batch, normalised and scaled on the device."""
        begun = time.perf_counter()
        batch = next(self._batches)
        self.waited_s += time.perf_counter() - begun
        if isinstance(batch, str):
            raise DataError(batch)
        images, labels = (tensor.to(self._device, non_blocking=True) for tensor in batch)
        inputs: Tensor = (images.float() / 255 - self._mean) / self._deviation
        if self._pixels != self._images.size:
            inputs = torch.nn.functional.interpolate(inputs, size=(self._pixels, self._pixels), mode="bilinear")
        return Batch(inputs=inputs, labels=labels)


def choose_workers(options: Options, images: Images, info: RankInfo) -> int:
    """Processes per rank: those asked for; none for images in memory; else the rank's share of the cores."""
    if options.workers is not None:
        return options.workers
    if images.in_memory:
        return 0
    return max(1, min(_MOST_WORKERS, len(os.sched_getaffinity(0)) // info.local_world_size))


def check_shared_memory(images: Images, options: Options, workers: int, *, place: Path = _SHARED_MEMORY) -> None:
    """DataError where the batches of all workers of this node do not fit: a worker would end by SIGBUS."""
    needed = workers * _PREFETCH * options.samples_per_step * images.channels * images.size**2
    if not needed or not place.exists():
        return
    usage = os.statvfs(place)
    free = usage.f_bavail * usage.f_frsize
    if free < needed:
        raise DataError(
            f"{place}: {free / 1e6:,.0f} MB free, and {workers} workers of this node need {needed / 1e6:,.0f} MB; "
            "start the container with --ipc=host or --shm-size, mount an emptyDir of medium Memory, or use --workers 0"
        )


class _Guarded:
    """Data set whose faults arrive as their text: an exception from a worker loses its message in a traceback."""

    def __init__(self, images: Images) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitems__(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor] | str:
        try:
            return self._images.__getitems__(numbers)
        except DataError as error:
            return str(error)


class _Shares:
    """Sample numbers of this rank: each epoch is another permutation, the same on all ranks."""

    def __init__(self, total: int, count: int, rank: int, world: int) -> None:
        self._total, self._count, self._rank, self._world = total, count, rank, world

    def __iter__(self) -> Iterator[list[int]]:
        epoch = 0
        while True:
            order = torch.randperm(self._total, generator=torch.Generator().manual_seed(_SEED + epoch))
            for first in range(0, self._total - self._count * self._world + 1, self._count * self._world):
                begin = first + self._rank * self._count
                yield order[begin : begin + self._count].tolist()
            epoch += 1


def _unchanged(batch: Any) -> Any:
    return batch
