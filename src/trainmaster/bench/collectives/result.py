"""Results of a run: rows, wrong data, lost ranks. Plain data; `core.schema` converts it to JSON and back."""

from __future__ import annotations

from dataclasses import dataclass

from trainmaster.bench.collectives.sweep import Sweep
from trainmaster.core.results import CheckResult, Overall, judge_overall

# A PASS needs a result of each.
PLANNED = ("collective_ranks", "collective_data", "collective_transport", "collective_bandwidth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rank: its host, device and process."""

    rank: int
    host: str
    pid: int
    device: str  # "cpu", or the GPU's product name
    local_rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """Received data that differs from the sent data."""

    rank: int
    index: int  # of the first wrong element in the received buffer
    expected: int  # as a 32-bit pattern
    got: int
    count: int
    when: str  # "before timing" or "after timing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One rank's figures at one point."""

    rank: int
    seq: int  # of its point
    repeats: int
    mean_us: float  # of rounds back to back, as nccl-tests times them
    median_us: float
    p95_us: float
    bytes: int  # really moved: the size, rounded down to whole elements for every rank
    verify_s: float
    took_s: float
    wrong: Wrong | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One collective at one size. Times are those of the slowest rank."""

    seq: int
    collective: str
    size_bytes: int
    ranks: int
    heard: tuple[int, ...]  # ranks that finished it; all of them, or the row says nothing about speed
    repeats: int
    time_us: float
    algbw_gbps: float
    busbw_gbps: float
    median_us: float
    p95_us: float
    slowest_rank: int
    wrong: tuple[Wrong, ...] = ()

    @property
    def complete(self) -> bool:
        return len(self.heard) == self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A rank that blocked the run, and its last position. rank None: no single rank is to blame."""

    rank: int | None
    host: str
    pid: int | None
    reason: str
    state: str  # "killed", "stopped", "failed", "behind", "silent", "hung"
    collective: str | None
    size_bytes: int | None
    seq: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All results of a run. `results` are the verdicts; the rest is their evidence."""

    sweep: Sweep
    backend: str
    world: int
    nodes: int
    members: tuple[Member, ...]
    rows: tuple[Row, ...]
    partial: tuple[Row, ...] = ()  # points that some ranks finished before the end
    lost: tuple[Lost, ...] = ()
    results: tuple[CheckResult, ...] = ()
    transport: str = ""  # in words
    notes: tuple[str, ...] = ()
    timings: tuple[Timing, ...] = ()  # every rank's own, of every point it finished
    took_s: float = 0.0
    v: int = 1

    @property
    def overall(self) -> Overall:
        return judge_overall(self.results, planned=PLANNED)

    @property
    def gpu(self) -> str | None:
        """The product name that all ranks share; None on CPUs and mixed machines."""
        names = {member.device for member in self.members}
        return names.pop() if len(names) == 1 and names != {"cpu"} else None
