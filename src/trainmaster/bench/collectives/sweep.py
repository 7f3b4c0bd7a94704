"""What is measured: which collectives, at which sizes, by how many ranks, and how long anybody may be silent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from trainmaster.bench.limits import render_size
from trainmaster.core.errors import UsageError

Backend = Literal["nccl", "gloo"]

# Bus bandwidth = algorithm bandwidth × this: what each link really carried (nccl-tests, doc/PERFORMANCE.md).
# Sizes count as there: the buffer of a rank; of all_gather the received one, of reduce_scatter the sent one.
FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda _: 1.0,
    "sendrecv": lambda _: 1.0,  # each rank to the next one, all at once
}
COLLECTIVES = tuple(FACTORS)
_ALIASES = {"alltoall": "all_to_all", "send_recv": "sendrecv", "allreduce": "all_reduce", "allgather": "all_gather"}

ELEMENT_BYTES = 4
# Without --max. NCCL: what the published baselines name. gloo: enough for every core's cache to be left behind; it is
# bound by the CPU and would take minutes for sizes that only fabrics need.
DEFAULT_MAX: Mapping[str, int] = {"nccl": 8 << 30, "gloo": 64 << 20}
_SECONDS: Mapping[str, float] = {"nccl": 0.25, "gloo": 0.15}  # spent on timing one size


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One run. It crosses to every rank as JSON; all of them must hold the same one."""

    collectives: tuple[str, ...] = COLLECTIVES
    min_bytes: int = 8 << 10
    max_bytes: int | None = None  # None: as large as is usual for the backend
    factor: int = 2
    backend: Backend | None = None  # None: nccl where there are GPUs
    processes: int | None = None  # ranks on this machine; None: one per GPU, or two without
    timeout_s: float = 60.0  # without any sign of progress
    start_timeout_s: float = 180.0  # until every rank has met the others; a cold file system needs minutes for torch
    seconds: float | None = None  # spent on timing one size; None: by backend

    def faults(self) -> Iterator[str]:
        """What is wrong with it, in words."""
        for name in self.collectives:
            if name not in FACTORS:
                yield f"--collective {name}: not one of {', '.join(COLLECTIVES)}"
        if not self.collectives:
            yield f"no collective is named; take some of {', '.join(COLLECTIVES)}"
        if self.min_bytes < ELEMENT_BYTES:
            yield f"--min {self.min_bytes}: an element has {ELEMENT_BYTES} bytes"
        if self.max_bytes is not None and self.max_bytes < self.min_bytes:
            yield f"--max {render_size(self.max_bytes)} is less than --min {render_size(self.min_bytes)}"
        if self.factor < 2:
            yield f"--factor {self.factor}: each size must be a multiple of the one before; take 2"
        if self.processes is not None and self.processes < 1:
            yield f"--processes {self.processes}: at least 1"
        if self.timeout_s <= 0:
            yield f"--timeout {self.timeout_s}: more than 0 seconds"

    def checked(self) -> Sweep:
        if faults := list(self.faults()):
            raise UsageError("; ".join(faults))
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One collective at one size. `seq` counts from 0 in the order in which every rank takes them."""

    seq: int
    collective: str
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.collective} of {render_size(self.size_bytes)}"


def points(sweep: Sweep, backend: Backend, largest: int | None = None) -> list[Point]:
    """Every point, in order; `largest` is what the memory of the ranks allows."""
    end = sweep.max_bytes if sweep.max_bytes is not None else max(DEFAULT_MAX[backend], sweep.min_bytes)
    end = end if largest is None else min(end, largest)
    sizes, size = [], sweep.min_bytes
    while size <= end:
        sizes.append(size)
        size *= sweep.factor
    names = [(name, size) for name in sweep.collectives for size in sizes]
    return [Point(seq=seq, collective=name, size_bytes=size) for seq, (name, size) in enumerate(names)]


def cut(sweep: Sweep, plan: list[Point], planned: int) -> list[Point]:
    """The same plan, ended where the ranks agreed to end it for lack of memory."""
    sizes = [point.size_bytes for point in plan][: planned // len(sweep.collectives)]
    kept = [(point.collective, point.size_bytes) for point in plan if point.size_bytes in sizes]
    return [Point(seq=seq, collective=name, size_bytes=size) for seq, (name, size) in enumerate(kept)]


def seconds_of(sweep: Sweep, backend: Backend) -> float:
    return sweep.seconds if sweep.seconds is not None else _SECONDS[backend]


def warmups(size_bytes: int) -> int:
    """Untimed rounds: the first ones open connections and settle clocks; large ones do that by themselves."""
    return 2 if size_bytes >= 16 << 20 else 5


def repeats(took_s: float, seconds: float) -> int:
    """Timed rounds, so that a point takes about `seconds`: enough for a p95 where they are short, few where long."""
    return min(max(round(seconds / max(took_s, 1e-7)), 5), 200)


def parse_collectives(words: list[str]) -> tuple[str, ...]:
    """`all_reduce,all_gather` or a list of them; `all` is all. Names as nccl-tests writes them are understood."""
    names = [name.strip().lower().replace("-", "_") for word in words for name in word.split(",") if name.strip()]
    if not names or "all" in names:
        return COLLECTIVES
    return tuple(dict.fromkeys(_ALIASES.get(name, name) for name in names))
