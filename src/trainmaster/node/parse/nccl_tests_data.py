"""Data of an nccl-tests run, and what its numbers prove about themselves.

Bus bandwidth is algorithm bandwidth times a factor that depends only on the collective and on the number of ranks
(doc/PERFORMANCE.md of nccl-tests). So the two columns say how many ranks really took part, whatever the launcher was
told: "16 GPUs" that were two separate runs of 8 show a factor of 1.75, not 1.875.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainmaster.node.parse import read_float

# Factor 1 (broadcast, reduce, sendrecv, hypercube) says nothing about the number of ranks.
_TWICE = frozenset({"all_reduce"})  # 2(n-1)/n
_ONCE = frozenset({"all_gather", "reduce_scatter", "alltoall", "gather", "scatter"})  # (n-1)/n
# Sizes are printed as multiples of one element here, and of 16 bytes for each rank elsewhere (getCollByteCount).
_UNSPLIT = frozenset({"all_reduce", "broadcast", "reduce", "sendrecv"})
_ALIGNMENT = 16  # bytes
_MOST_SIZES = 65_536  # of a sweep; more are no benchmark
_SLACK = 0.02  # between size/time and the printed bandwidth: they are rounded from the same number


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One side of a row: out of place or in place. None: the tool printed no number."""

    time_us: float | None
    algbw_gbps: float | None
    busbw_gbps: float | None
    wrong: int | None = None  # elements with a wrong value; None: not checked
    delta: float | None = None  # largest difference, in versions before 2.13
    ratio: tuple[float, float] | None = None  # bounds of busbw/algbw, as far as the printed digits tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One message size."""

    size_bytes: int
    count: int
    dtype: str
    redop: str | None
    root: int | None
    out_of_place: Measure | None
    in_place: Measure | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One rank, as the head of the output lists it."""

    rank: int
    host: str
    device: int
    bus_id: str
    name: str
    pid: int | None = None
    group: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One benchmark from its head to its summary. Judge it at a size; its average depends on the sweep."""

    collective: str | None
    devices: tuple[Device, ...]
    rows: tuple[Row, ...]
    out_of_bounds: int | None  # None: the summary is missing
    average_busbw_gbps: float | None  # as printed, for display only
    corrupt: bool  # anything said that the data was wrong
    validated: bool | None  # False: run with -c 0, the data was not looked at
    process_ranks: int = 1  # ranks for each device listed: the file of -J lists one device for each process
    label: str = ""  # the launcher's mark on its lines: "[1,0]", "node1"
    version: str | None = None
    nccl_version: str | None = None
    faults: tuple[str, ...] = ()

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(device.host for device in self.devices))

    @property
    def ranks(self) -> int:
        """Number of ranks that the list of devices stands for; 0 where there is no list."""
        return len(self.devices) * self.process_ranks

    def at(self, size_bytes: int) -> Row | None:
        """The row of that size; None if it was not measured, or more than once."""
        rows = [row for row in self.rows if row.size_bytes == size_bytes]
        return rows[0] if len(rows) == 1 else None

    def proven_ranks(self, collective: str | None = None) -> tuple[int, int | None] | None:
        """How many ranks took part, at least and at most (None: no upper bound), as the bandwidths tell.

        None where they cannot tell; (1, 0) where no number of ranks explains them.
        """
        return proven_ranks(self.rows, collective or self.collective)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Everything one stream held: N runs where a launcher started N copies that never met."""

    runs: tuple[Run, ...]
    errors: tuple[str, ...] = ()  # failures the tool reported in words
    warnings: tuple[str, ...] = ()  # NCCL WARN lines
    deaths: tuple[str, ...] = ()  # a launcher, shell or scheduler reports that a process died
    faults: tuple[str, ...] = ()


def measure(
    *, time: str, algbw: str, busbw: str, wrong: int | None = None, delta: float | None = None
) -> tuple[Measure, bool]:
    """A side from its printed numbers; False where one of the three is no number."""
    values = [_printed(text) for text in (time, algbw, busbw)]
    (time_us, _), (alg, alg_half), (bus, bus_half) = values
    ratio = None
    if alg is not None and bus is not None and alg - alg_half > 0:
        ratio = (max(0.0, bus - bus_half) / (alg + alg_half), (bus + bus_half) / (alg - alg_half))
    made = Measure(time_us=time_us, algbw_gbps=alg, busbw_gbps=bus, wrong=wrong, delta=delta, ratio=ratio)
    return made, None not in (time_us, alg, bus)


def contradicts(size_bytes: int, side: Measure) -> bool:
    """Whether time and bandwidth of a side cannot both be right."""
    if side.time_us is None or side.algbw_gbps is None or side.time_us <= 0:
        return side.time_us is not None and side.time_us <= 0
    implied = size_bytes / side.time_us / 1e3
    # Two decimals of a small number are coarse: 0.005 either way, and 0.05 us of a short time.
    return abs(implied - side.algbw_gbps) > 0.0051 + implied * (_SLACK + 0.051 / side.time_us)


def proven_ranks(rows: tuple[Row, ...], collective: str | None) -> tuple[int, int | None] | None:
    low, high = 0.0, math.inf
    for ratio in _ratios(rows):
        low, high = max(low, ratio[0]), min(high, ratio[1])
    if high is math.inf:
        return None
    if collective is None and low > 1:
        collective = "all_reduce"  # no other factor is above 1
    if collective in _TWICE:
        low, high = low / 2, high / 2
    elif collective not in _ONCE:
        return None
    if low > high or low >= 1:
        return 1, 0
    # (n-1)/n = x, so n = 1/(1-x).
    least = math.ceil(1 / (1 - low) - 1e-6)
    return least, None if high >= 1 else math.floor(1 / (1 - high) + 1e-6)


def infer_collective(rows: tuple[Row, ...], ranks: int, hint: str | None = None) -> str | None:
    """The collective of a table that does not name it, from busbw/algbw, reduction and root; None where unclear.

    With n ranks the factor is 2(n-1)/n for all_reduce, (n-1)/n for reduce_scatter, all_gather and alltoall, and 1 for
    the rest. `hint` is the program named before the table; it counts only where the factor agrees.
    """
    ratios = list(_ratios(rows))
    if not ratios or not rows:
        return None
    low, high = max(ratio[0] for ratio in ratios), min(ratio[1] for ratio in ratios)
    hint = {"alltoallv": "alltoall"}.get(hint or "", hint)
    if hint is not None and _agrees(hint, low, high, ranks):
        return hint
    if low > 1:
        return "all_reduce"  # no other factor is above 1
    reduces, rooted = rows[0].redop not in (None, "none"), (rows[0].root or 0) >= 0 and rows[0].root is not None
    if ranks > 2 and low <= (ranks - 1) / ranks <= high < 1 and reduces and not rooted:
        return "reduce_scatter"
    return None


def _agrees(collective: str, low: float, high: float, ranks: int) -> bool:
    if ranks < 2:
        return True
    factor = (ranks - 1) / ranks
    wanted = 2 * factor if collective in _TWICE else factor if collective in _ONCE else 1.0
    return low <= wanted <= high


def expected_sizes(low: int | None, high: int | None, *, factor: int | None, step: int | None) -> Sequence[int] | None:
    """Sizes of a sweep in bytes; None where the parameters make none."""
    if low is None or high is None or low < 1 or high < low:
        return None
    if low == high:
        return (low,)
    if factor is not None and factor > 1:
        sizes = [low]
        while sizes[-1] * factor <= high:
            sizes.append(sizes[-1] * factor)
        return sizes
    linear = range(low, high + 1, step) if step is not None and step > 0 else None
    return linear if linear is not None and len(linear) <= _MOST_SIZES else None


def find_lost_sizes(rows: Sequence[Row], sizes: Sequence[int], collective: str | None, ranks: int) -> str | None:
    """A sentence if the rows are no whole sweeps of these sizes; None if they are, each once or each equally often.

    A count of rows alone is no proof: a lost size and a line that came twice make the same number.
    """
    if not rows or len(rows) < len(sizes):
        return f"{len(rows)} of {len(sizes)} sizes were measured"
    slack = _ALIGNMENT * (1 if collective in _UNSPLIT else max(1, ranks))
    cycles, rest = divmod(len(rows), len(sizes))
    measured = sorted(row.size_bytes for row in rows)
    wanted = sorted(size for size in sizes for _ in range(cycles))
    if rest == 0 and all(0 <= size - seen < slack for size, seen in zip(wanted, measured, strict=True)):
        return None
    lost = [size for size in sizes if not any(0 <= size - seen < slack for seen in set(measured))]
    if lost:
        return f"the size of {lost[-1]} bytes was not measured"
    return "the sizes measured are no whole sweep: a line is missing or comes twice"


def find_shared_gpu(devices: Sequence[Device]) -> str | None:
    """A sentence if two ranks list the same GPU; None if they do not, or where the list cannot tell.

    Before 2.17 the list had the bus number alone. It is 0 for every GPU of some virtual machines, and the ordinal is 0
    in every process that sees one GPU; both equal prove something only where the ordinals of the host differ.
    """
    ordinals: dict[str, set[int]] = {}
    for device in devices:
        ordinals.setdefault(device.host, set()).add(device.device)
    seen: dict[tuple[str, int, str], int] = {}
    for device in devices:
        key = (device.host, device.device, device.bus_id)
        telling = ":" in device.bus_id or len(ordinals[device.host]) > 1
        if telling and key in seen:
            return f"ranks {seen[key]} and {device.rank} list the same GPU {device.bus_id} of {device.host}"
        seen[key] = device.rank
    return None


def collective_of(program: str) -> str | None:
    """`/opt/nccl-tests/build/all_reduce_perf_mpi` is all_reduce."""
    name = program.replace("\\", "/").rsplit("/", 1)[-1].strip()
    stem = name.removesuffix(".exe").removesuffix("_mpi").removesuffix("_perf")
    return {"alltoallv": "alltoall"}.get(stem, stem) or None


def _ratios(rows: tuple[Row, ...]) -> Iterator[tuple[float, float]]:
    for row in rows:
        for side in (row.out_of_place, row.in_place):
            if side is not None and side.ratio is not None:
                yield side.ratio


def _printed(text: str) -> tuple[float | None, float]:
    """A printed number and half of its last digit."""
    value = read_float(text)
    if value is None or value < 0:
        return None, 0.0
    mantissa, _, exponent = text.strip().lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    return value, 0.5 * 10.0 ** (int(exponent or 0) - decimals) + 1e-9
