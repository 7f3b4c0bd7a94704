"""Rank, world size, node and rendezvous address of this process, complete."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainmaster.core.errors import UsageError
from trainmaster.node.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Identity of a rank. With replica groups, `rank` and `world_size` are those inside of its group."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nodes: int
    master: tuple[str, int] | None  # rendezvous host and port; None for a single rank
    restart: int = 0  # times that the launcher has restarted the ranks (torchrun --max-restarts)
    group: int = 0
    groups: int = 1

    @property
    def number(self) -> int:
        """The rank's number over all groups."""
        return self.group * self.world_size + self.rank

    @property
    def ranks(self) -> int:
        """Ranks of the run, over all groups."""
        return self.groups * self.world_size

    @property
    def prints(self) -> bool:
        """Whether this rank prints what concerns its node or its group."""
        return self.local_rank == 0 or (self.groups > 1 and self.rank == 0)

    def in_group(self, groups: int) -> RankInfo:
        """The identity of this rank of the whole run inside of its group, where there are so many."""
        each = self.world_size // groups
        assert each * groups == self.world_size, "RecoveryConfig.faults_on let uneven groups through"
        group, rank = divmod(self.rank, each)
        return replace(self, rank=rank, world_size=each, group=group, groups=groups)

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
