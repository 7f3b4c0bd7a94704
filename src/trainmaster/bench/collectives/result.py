"""What a run found: rows, wrong data, lost ranks. Plain data; `core.schema` turns it into JSON and back."""

from __future__ import annotations

from dataclasses import dataclass

from trainmaster.bench.collectives.sweep import Sweep
from trainmaster.core.results import CheckResult, Overall, judge_overall

# Every one of them must have spoken for a PASS.
PLANNED = ("collective_ranks", "collective_data", "collective_transport", "collective_bandwidth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rank, as it introduced itself."""

    rank: int
    host: str
    pid: int
    device: str  # "cpu", or the GPU's product name
    local_rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """Data that arrived with another value than was sent."""

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
    """One collective at one size. It is done when its slowest rank is, so times are that rank's."""

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
    """A rank that did not come along, and where it was last seen. rank None: nobody can be singled out."""

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
    """Everything a run found. `results` are its judgement; the rest is what they rest on."""

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
