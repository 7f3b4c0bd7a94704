"""Recommendations from the measurements of a run: batch, exchange, data workers, and the resources of a pod."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import median

from trainmaster.bench.accept.options import Options
from trainmaster.bench.accept.record import RankRecord, total_s, total_samples
from trainmaster.core.gpus import of_gpu

SHARED_MEMORY = "/dev/shm"  # noqa: S108 (where torch's workers and NCCL put their buffers)

_EXCHANGE, _WAIT, _MEMORY = 0.2, 0.05, 0.45  # shares from which, or up to which, a change is worth its trouble
_CORES_PER_RANK = 4  # ours: the rank, NCCL's proxy threads and the host's own work
_SHARED_MEMORY_GB = 8.0  # least room in /dev/shm of a pod: NCCL's buffers between its GPUs


def recommend(options: Options, records: Sequence[RankRecord]) -> list[str]:
    """Sentences for people who size jobs on these machines."""
    sentences = [*_memory(options, records), *_exchange(options, records), *_data(records)]
    return [*sentences, _pod(options, records)]


def _memory(options: Options, records: Sequence[RankRecord]) -> list[str]:
    gpu = of_gpu(records[0].device.removeprefix("NVIDIA "))
    used = [record.memory_bytes for record in records if record.memory_bytes is not None]
    if gpu is None or gpu.memory_gb is None or not used:
        return []
    share = max(used) / (gpu.memory_gb * 1e9)
    if share > _MEMORY:
        return []
    return [f"{share:.0%} of the GPU's memory was used: --batch-size {2 * options.batch_size} fits as well"]


def _exchange(options: Options, records: Sequence[RankRecord]) -> list[str]:
    if len(records) == 1:
        return []
    step_s, alone_s = (median(median(getattr(record, name)) for record in records) for name in ("steps_s", "alone_s"))
    share = max(0.0, 1 - alone_s / step_s)
    together = total_samples(options, records) / total_s(records)
    alone = sum(options.samples_per_step / median(record.alone_s) for record in records)
    scaling = f"{len(records)} ranks reach {together / alone:.0%} of the sum of single ranks"
    if share < _EXCHANGE:
        return [f"{scaling}: more ranks of this kind are worth their price"]
    return [
        f"{scaling}, and {share:.0%} of a step is exchange: use a larger --batch-size or --accumulate "
        f"{2 * options.accumulate}, or a faster path between the ranks, before adding more of them"
    ]


def _data(records: Sequence[RankRecord]) -> list[str]:
    waits = [record.waited_s for record in records if record.waited_s is not None]
    share = max(waits) / total_s(records) if waits else 0.0
    if share < _WAIT:
        return []
    workers = 2 * (records[0].workers or 1)
    return [f"{share:.0%} of the time the ranks waited for data: use --workers {workers}, or a faster disk"]


def _pod(options: Options, records: Sequence[RankRecord]) -> str:
    """Resources of one worker with as many ranks as the largest node here had."""
    ranks = max(Counter(record.node for record in records).values())
    workers = records[0].workers or 0
    batches = ranks * workers * 2 * options.samples_per_step * options.channels * options.pixels**2 / 1e9
    shared_gb = math.ceil(max(_SHARED_MEMORY_GB if ranks > 1 else 1.0, 2 * batches))
    unit = "GPU" if records[0].backend == "nccl" else "rank"
    cores = ranks * (_CORES_PER_RANK + workers)
    return (
        f"a worker with {ranks} {unit}{'s' if ranks > 1 else ''}: at least {cores} CPU cores, {shared_gb} GB in "
        f"{SHARED_MEMORY}, and memlock unlimited where InfiniBand is used"
    )
