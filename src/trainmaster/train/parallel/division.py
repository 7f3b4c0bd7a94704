"""Division of a step's batch among replica groups: a fixed list of micro-batches, each computed by one group.

The list follows from the config alone. Which groups live decides who computes what, never what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainmaster.core.config.train import TrainConfig
from trainmaster.train.parallel.rank_info import RankInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The micro-batches of every step: `count` of them, of which each rank of a group computes `rows` samples."""

    count: int
    ranks: int  # of a group
    rows: int

    @classmethod
    def of(cls, config: TrainConfig, rank_info: RankInfo) -> Division:
        """As at full strength: no pass is larger after a loss, there are only more of them."""
        rows = config.micro_sequences or config.batch_sequences // rank_info.ranks
        ranks = rank_info.world_size
        return cls(count=config.batch_sequences // (ranks * rows), ranks=ranks, rows=rows)

    def share(self, members: Sequence[int], group: int) -> range:
        """The micro-batches of a group: as many for each member as can be, and every one for exactly one member."""
        place, live = sorted(members).index(group), len(members)
        return range(place * self.count // live, (place + 1) * self.count // live)

    def passes(self, share: range, rank: int) -> list[range]:
        """The samples of each pass of one rank of the group, counted from the first of the step."""
        starts = [(number * self.ranks + rank) * self.rows for number in share]
        return [range(start, start + self.rows) for start in starts]
