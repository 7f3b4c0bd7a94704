"""One rank: joins the group, runs every point in order, verifies and times it, and records its progress.

The launcher starts `python -m trainmaster.bench.collectives.rank FOLDER` for each rank; FOLDER has the sweep.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from trainmaster.bench.collectives.operations import Operation
from trainmaster.bench.collectives.pattern import Ruler
from trainmaster.bench.collectives.progress import ProgressFile, ProgressSink
from trainmaster.bench.collectives.result import Timing, Wrong
from trainmaster.bench.collectives.sweep import (
    DEFAULT_MAX,
    ELEMENT_BYTES,
    Backend,
    Point,
    Sweep,
    points,
    repeats,
    seconds_of,
    warmups,
)
from trainmaster.core import schema
from trainmaster.node.node_name import host_name
from trainmaster.node.owner import die_with_variable

PARENT_VARIABLE = "TRAINMASTER_BANDWIDTH_PARENT"  # the launcher's process number; ranks die with it
SWEEP_FILE = "sweep.json"
_SHARE = 0.8  # of free memory, for two buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """Rank, world size and backend of this process."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    backend: Backend


def main() -> None:
    """A rank of the local launcher."""
    die_with_variable(PARENT_VARIABLE)
    folder = Path(sys.argv[1])
    sweep = schema.build(Sweep, json.loads((folder / SWEEP_FILE).read_text()))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = RankConfig(
        rank=rank,
        world=world,
        local_rank=int(os.environ["LOCAL_RANK"]),
        local_world=int(os.environ["LOCAL_WORLD_SIZE"]),
        backend="nccl" if sweep.backend == "nccl" else "gloo",
    )
    # A file, not a port: no other process can take it between choice and bind.
    store: Store = dist.FileStore(str(folder / "store"), world)  # type: ignore[attr-defined]
    progress = ProgressFile(folder, rank)
    progress.advance(-1, 0, inside=False)
    try:
        run(sweep, config, store, progress)
    except Exception as error:
        # Recorded before anything else can hang: the launcher must tell the first failure from its consequences.
        progress.record("failed", why=f"{type(error).__name__}: {error}"[:2000])
        raise
    progress.close()


def run(sweep: Sweep, config: RankConfig, store: Store, progress: ProgressSink) -> None:
    """Run a rank from rendezvous to the end."""
    device = _device(config)
    progress.record(
        "here",
        host=host_name(),
        pid=os.getpid(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        local_rank=config.local_rank,
        torch=str(torch.__version__),
    )
    # Longer than the watcher waits: it names the lost rank, which the backend cannot.
    patience = datetime.timedelta(seconds=2 * max(sweep.timeout_s, sweep.start_timeout_s))
    store.set_timeout(patience)
    dist.init_process_group(
        config.backend,
        store=PrefixStore("group", store),
        rank=config.rank,
        world_size=config.world,
        timeout=patience,
        device_id=device if device.type == "cuda" else None,
    )
    largest, note = _agree_on_memory(store, config, device, sweep)
    plan = points(sweep, config.backend, largest)
    if not plan:
        raise MemoryError(f"not even the smallest size fits: {note}")
    progress.record("met", points=len(plan), note=note)
    length = max(point.size_bytes for point in plan) // ELEMENT_BYTES + config.world
    send, recv = (torch.zeros(length, dtype=torch.int32, device=device) for _ in range(2))
    ruler = Ruler(device, length)
    for point in plan:
        operation = Operation(
            point.collective, point.size_bytes, rank=config.rank, world=config.world, send=send, recv=recv
        )
        timing = _PointRun(sweep, config, store, progress, device, ruler, operation, point).take()
        progress.record("left", timing=schema.to_plain(timing))
    progress.record("done")  # before the group is destroyed: that can hang, and nothing depends on it
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


@dataclass(slots=True)
class _PointRun:
    """Execution of one point by one rank."""

    sweep: Sweep
    config: RankConfig
    store: Store
    progress: ProgressSink
    device: torch.device
    ruler: Ruler
    operation: Operation
    point: Point
    op: int = 0

    def take(self) -> Timing:
        begun = time.perf_counter()
        first, first_s = self._verify("before timing", 2 * self.point.seq)
        took = self._warm_up()
        count = self._agree_on_repeats(took)
        samples = self._time(count)
        last, last_s = self._verify("after timing", 2 * self.point.seq + 1)
        return Timing(
            rank=self.config.rank,
            seq=self.point.seq,
            repeats=count,
            mean_us=statistics.fmean(samples) * 1e6,
            median_us=statistics.median(samples) * 1e6,
            p95_us=sorted(samples)[max(0, -(-95 * len(samples) // 100) - 1)] * 1e6,
            bytes=self.operation.bytes,
            verify_s=first_s + last_s,
            took_s=time.perf_counter() - begun,
            wrong=first or last,
        )

    def _once(self) -> None:
        self.op += 1
        self.progress.advance(self.point.seq, self.op, inside=True)
        self.operation.run()
        self.progress.advance(self.point.seq, self.op, inside=False)

    def _verify(self, when: str, salt: int) -> tuple[Wrong | None, float]:
        begun = time.perf_counter()
        self.ruler.draw(self.operation.send, self.operation.outgoing(salt))
        self._wait()
        drawn = time.perf_counter()
        self._once()
        self._wait()
        arrived = time.perf_counter()
        mismatch = self.ruler.compare(self.operation.result, self.operation.incoming(salt))
        took = time.perf_counter() - arrived + drawn - begun
        if mismatch is None:
            return None, took
        wrong_data = Wrong(
            rank=self.config.rank,
            when=when,
            index=mismatch.index,
            expected=mismatch.expected,
            got=mismatch.got,
            count=mismatch.count,
        )
        return wrong_data, took

    def _warm_up(self) -> float:
        """Seconds of the quickest round, without the first, which may open connections."""
        taken = []
        for _ in range(warmups(self.point.size_bytes)):
            begun = time.perf_counter()
            self._once()
            self._wait()
            taken.append(time.perf_counter() - begun)
        return min(taken[1:])

    def _agree_on_repeats(self, took_s: float) -> int:
        """Number of rounds, decided by rank 0 through the store: corrupt data must not make ranks disagree."""
        key = f"repeats/{self.point.seq}"
        if self.config.rank == 0:
            count = repeats(took_s, seconds_of(self.sweep, self.config.backend))
            self.store.set(key, str(count))
            return count
        return int(self.store.get(key))

    def _time(self, count: int) -> list[float]:
        """Seconds of each round, after an untimed round that aligns the ranks."""
        self._once()
        if self.device.type != "cuda":
            stamps = [time.perf_counter()]
            for _ in range(count):
                self._once()
                stamps.append(time.perf_counter())
            return [after - before for before, after in pairwise(stamps)]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for mark in marks[1:]:
            self._once()
            mark.record()
        self._wait()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _device(config: RankConfig) -> torch.device:
    if config.backend != "nccl":
        torch.set_num_threads(1)  # ranks share the CPUs; each more thread takes from a neighbour's
        return torch.device("cpu")
    # A launcher may show each rank only its own GPU.
    device = torch.device("cuda", config.local_rank if torch.cuda.device_count() > 1 else 0)
    torch.cuda.set_device(device)
    return device


def _agree_on_memory(store: Store, config: RankConfig, device: torch.device, sweep: Sweep) -> tuple[int, str]:
    """The largest size that fits on every rank, and the rank that limits it."""
    store.set(f"free/{config.rank}", str(_free(device, config)))
    if config.rank == 0:
        free = [int(store.get(f"free/{rank}")) for rank in range(config.world)]
        store.set("free", f"{min(free)} {free.index(min(free))}")
    least, owner = (int(word) for word in store.get("free").split())
    largest = int(least * _SHARE / 2)
    wanted = sweep.max_bytes or DEFAULT_MAX[config.backend]
    note = f"sizes end at {largest >> 20} MiB: rank {owner} has {least >> 20} MiB free, and two buffers must fit"
    return largest, note if largest < wanted else ""


def _free(device: torch.device, config: RankConfig) -> int:
    """Bytes that this rank may allocate."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo").read_text()
    free = next(int(line.split()[1]) << 10 for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    with contextlib.suppress(OSError, ValueError):  # no cgroup, or one without a limit ("max")
        cgroup = Path("/sys/fs/cgroup")
        limit = int((cgroup / "memory.max").read_text()) - int((cgroup / "memory.current").read_text())
        free = min(free, limit)
    return max(free, 0) // config.local_world


if __name__ == "__main__":
    main()
