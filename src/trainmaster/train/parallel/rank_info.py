"""Rank, world size, node and rendezvous address of this process, complete."""

from __future__ import annotations

from dataclasses import dataclass

from trainmaster.core.errors import UsageError
from trainmaster.node.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Identity of a rank."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nodes: int
    master: tuple[str, int] | None  # rendezvous host and port; None for a single rank
    restart: int = 0  # times that the launcher has restarted the ranks (torchrun --max-restarts)

    def share(self, total: int) -> range:
        """This rank's contiguous share of `total` items; the shares of all ranks cover each item once."""
        each = total // self.world_size
        assert each * self.world_size == total, "TrainConfig.faults_on let an uneven share through"
        return range(self.rank * each, (self.rank + 1) * each)


def find_rank_info(ranks: Ranks) -> RankInfo:
    """Rank info from the launcher; UsageError if the launcher started one process per node and no ranks yet."""
    if (
        ranks.rank is None
        or ranks.world_size is None
        or ranks.local_rank is None
        or ranks.local_world_size is None
        or (ranks.world_size > 1 and (ranks.master_addr is None or ranks.master_port is None))
    ):
        raise UsageError(
            f"launcher {ranks.launcher}: this process is a node, not yet a rank; start the ranks on it with torchrun "
            "or with `python -m trainmaster.agent`"
        )
    alone = ranks.master_addr is None or ranks.master_port is None
    return RankInfo(
        rank=ranks.rank,
        world_size=ranks.world_size,
        local_rank=ranks.local_rank,
        local_world_size=ranks.local_world_size,
        node_rank=ranks.node_rank,
        nodes=ranks.nodes,
        master=None if alone else (str(ranks.master_addr), int(ranks.master_port or 0)),
        restart=ranks.restart,
    )
