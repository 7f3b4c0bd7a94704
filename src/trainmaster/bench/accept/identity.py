"""Rank of this process, or the node whose ranks it starts.

Beside what `node.ranks` reads: the loop of `docker run` on bare metal, which sets RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT on every machine, and no number of ranks per machine. The ranks find their machines then
after they have met.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainmaster.core.loopback import is_loopback_host
from trainmaster.node.ranks import Ranks, detect
from trainmaster.train.parallel.rank_info import RankInfo, find_rank_info

_PLAIN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def find_ranks(env: Mapping[str, str]) -> Ranks:
    """Ranks of the launcher. Node 0 of 0 stands for a machine that is still to be found."""
    if machine_unknown(env):
        # One machine as far as the environment goes; `place` corrects it.
        return detect({**env, "LOCAL_WORLD_SIZE": env["WORLD_SIZE"], "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"})
    return detect(env)


def machine_unknown(env: Mapping[str, str]) -> bool:
    """Whether ranks are numbered over several machines, and neither their number nor ours is stated."""
    stated = ("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    if not all(name in env for name in _PLAIN) or any(name in env for name in stated):
        return False
    return env["WORLD_SIZE"] != "1" and not is_loopback_host(env["MASTER_ADDR"])


def complete(ranks: Ranks, processes: int) -> Ranks:
    """A node with a single rank is that rank; with more it has to start them, and stays as it is."""
    if processes > 1 or (ranks.nodes > 1 and (ranks.master_addr is None or ranks.master_port is None)):
        return ranks
    return replace(ranks, rank=ranks.node_rank, world_size=ranks.nodes, local_rank=0, local_world_size=1)


def find_info(env: Mapping[str, str], ranks: Ranks | None = None) -> RankInfo:
    """Rank info of a process that is a rank."""
    info = find_rank_info(ranks or find_ranks(env))
    # As many machines as ranks until they have met: gloo must not be bound to the loopback.
    return replace(info, nodes=info.world_size, local_world_size=1) if machine_unknown(env) else info


def read_machine() -> str:
    """The same for all containers of one machine, and different on every other."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def place(info: RankInfo, machines: Sequence[str]) -> RankInfo:
    """Rank info with the node that follows from the machines of all ranks, by rank."""
    order = list(dict.fromkeys(machines))
    own = machines[info.rank]
    return replace(info, node_rank=order.index(own), nodes=len(order), local_world_size=machines.count(own))
