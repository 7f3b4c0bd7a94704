"""Stragglers: each rank's own time against the median of all. A rank is slow only where most ranks are faster.

Ranks synchronise in every layer, so all steps take equally long, whichever rank is slow. What differs is a rank's own
time: computing, and waiting for its samples. On a CPU the kernel reports it; on a GPU a short burst of matrix products,
timed on the device every few seconds, finds a card that is slower than the others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trainmaster.train.metrics.rate import Reading

if TYPE_CHECKING:
    from trainmaster.train.parallel.shard import World

EXCHANGE_S = 5.0  # at least so long between two exchanges
_SIZE, _PRODUCTS = 4096, 4  # of the burst: less than a millisecond on an H200
_LEAST_S = 0.002  # differences below this are no rank's fault


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """One rank's own time in a step."""

    rank: int
    node: int
    step_s: float
    data_s: float
    compute_s: float | None = None
    burst_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Excess of a rank or node over the median, as a share of a step, and its cause."""

    name: str  # "rank 3 (node 1)" or "node 1"
    rank: int | None
    node: int
    score: float
    what: str


def score(all_ranks: Sequence[RankTime]) -> list[Score]:
    """Scores of all ranks, slowest first, preceded by nodes whose ranks are all slow."""
    step_s = max(statistics.median(own.step_s for own in all_ranks), 1e-9)
    scores = []
    for own in all_ranks:
        parts = {
            "data": _excess(own.data_s, [other.data_s for other in all_ranks]) / step_s,
            "compute": _excess(own.compute_s, [other.compute_s for other in all_ranks]) / step_s,
            "compute (burst)": _relative(own.burst_s, [other.burst_s for other in all_ranks]),
        }
        what = max(parts, key=lambda name: parts[name])
        name = f"rank {own.rank} (node {own.node})"
        scores.append(Score(name=name, rank=own.rank, node=own.node, score=max(0.0, parts[what]), what=what))
    scores.sort(key=lambda item: -item.score)
    return [*_nodes(scores), *scores]


def _nodes(ranks: Sequence[Score]) -> list[Score]:
    nodes: dict[int, list[Score]] = {}
    for rank in ranks:
        nodes.setdefault(rank.node, []).append(rank)
    if len(nodes) < 2:
        return []
    # Its best rank: a node is slow when all of it is.
    least = {node: min(members, key=lambda rank: rank.score) for node, members in nodes.items() if len(members) > 1}
    scores = [
        Score(name=f"node {node}", rank=None, node=node, score=rank.score, what=rank.what)
        for node, rank in least.items()
    ]
    return sorted((rank for rank in scores if rank.score > 0), key=lambda item: -item.score)


def _excess(value: float | None, values: Sequence[float | None]) -> float:
    known = [other for other in values if other is not None]
    if value is None or len(known) < 2:
        return 0.0
    above = value - statistics.median_high(known)
    return above if above > _LEAST_S else 0.0


def _relative(value: float | None, values: Sequence[float | None]) -> float:
    known = [other for other in values if other is not None]
    return value / statistics.median_high(known) - 1 if value is not None and len(known) > 1 else 0.0


class Persistent:
    """Stragglers that were slow in `readings` readings in a row; reported once, until they recover."""

    def __init__(self, *, share: float, readings: int) -> None:
        self._share, self._readings = share, readings
        self._row: dict[str, int] = {}

    def add(self, scores: Sequence[Score]) -> list[Score]:
        """Ranks and nodes that have just become stragglers."""
        slow = {item.name: item for item in scores if item.score >= self._share}
        self._row = {name: self._row.get(name, 0) + 1 for name in slow}
        return [item for name, item in slow.items() if self._row[name] == self._readings]


class Exchange:
    """Exchange of the ranks' own times; a collective."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._burst: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._matrix: torch.Tensor | None = None

    def run(self, reading: Reading) -> list[RankTime]:
        rank_info = self._world.rank_info
        nan = math.nan
        mine = torch.tensor(
            [
                float(rank_info.node_rank),
                reading.step_s,
                reading.data_s,
                nan if reading.compute_s is None else reading.compute_s,
                self._read_burst(),
            ],
            dtype=torch.float64,
        )
        parts = [torch.empty_like(mine) for _ in range(rank_info.world_size)]
        dist.all_gather(parts, mine)
        self._begin_burst()
        return [_own(rank, part.tolist()) for rank, part in enumerate(parts)]

    def _begin_burst(self) -> None:
        if self._world.device.type != "cuda":
            return
        if self._matrix is None:
            self._matrix = torch.ones(_SIZE, _SIZE, device=self._world.device, dtype=torch.bfloat16)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(_PRODUCTS):
            torch.mm(self._matrix, self._matrix)
        end.record()
        self._burst = begin, end

    def _read_burst(self) -> float:
        """Duration of the burst of the previous exchange, which is complete by now."""
        if self._burst is None or not self._burst[1].query():  # type: ignore[no-untyped-call]
            return math.nan
        return float(self._burst[0].elapsed_time(self._burst[1])) / 1e3


def _own(rank: int, numbers: Sequence[float]) -> RankTime:
    node, step_s, data_s, compute_s, burst_s = numbers
    known: Mapping[str, float] = {
        name: value for name, value in (("compute_s", compute_s), ("burst_s", burst_s)) if not math.isnan(value)
    }
    return RankTime(rank=rank, node=int(node), step_s=step_s, data_s=data_s, **known)
