"""All results so far, indexed by the parts they crossed."""

from __future__ import annotations

from collections import Counter

from trainmaster.bench.isolate.parts import Pair, Part, Topology


class Record:
    """Results of pair tests in the order they came; `cover` says which of them a part's fault would show in."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.pairs: list[Pair] = []
        self.gbps: list[float | None] = []
        self.rounds: list[int] = []
        self.cross: list[bool] = []
        self.parts: list[list[Part]] = []
        self.cover: dict[Part, list[int]] = {}
        self.by_pair: dict[Pair, list[int]] = {}
        self.tested: Counter[str] = Counter()

    def add(self, number: int, pair: Pair, gbps: float | None) -> None:
        pair = (pair[0], pair[1]) if pair[0] < pair[1] else (pair[1], pair[0])
        here = len(self.pairs)
        self.pairs.append(pair)
        # A test that moved nothing or reports an impossible rate has no result.
        self.gbps.append(gbps if gbps is not None and 0 < gbps < float("inf") else None)
        self.rounds.append(number)
        self.cross.append(self.topology.crosses_racks(pair))
        self.parts.append(self.topology.parts(pair))
        for part in self.parts[-1]:
            self.cover.setdefault(part, []).append(here)
        self.by_pair.setdefault(pair, []).append(here)
        self.tested.update(pair)

    def __len__(self) -> int:
        return len(self.pairs)
