"""One process of a SageMaker training job: its hosts and ranks, and environments for ranks of its own.

SageMaker starts a program once per GPU with torchrun (RANK, LOCAL_RANK …) or MPI (OMPI_COMM_WORLD_*, without
MASTER_ADDR), or once per host without either. The hosts are in SM_HOSTS, this one in SM_CURRENT_HOST, the first host's
address in SM_MASTER_ADDR.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainmaster.core.errors import UsageError
from trainmaster.core.vendors.sagemaker_hosts import read_hosts

Distribution = Literal["torchrun", "mpi", "none"]
# Variables of a rank, as torchrun and Trainmaster's agent set them.
RANK_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """This process within the job. Without a distribution one process stands for its whole host."""

    hosts: tuple[str, ...]
    here: str
    distribution: Distribution
    rank: int
    world: int
    local_rank: int
    per_node: int
    master: tuple[str, int]
    instance: str | None

    @property
    def index(self) -> int:
        return self.hosts.index(self.here)

    @property
    def first_on_node(self) -> bool:
        return self.local_rank == 0

    @property
    def first(self) -> bool:
        return self.first_on_node and self.index == 0


def read_job(env: Mapping[str, str]) -> Job:
    """The job of this environment. UsageError where it contradicts itself."""
    job = read_hosts(env)
    distribution: Distribution = "none"
    names: tuple[str, ...] = ()
    if "OMPI_COMM_WORLD_RANK" in env:
        distribution = "mpi"
        names = tuple(f"OMPI_COMM_WORLD_{word}" for word in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    elif "LOCAL_RANK" in env and "RANK" in env:
        distribution, names = "torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, world, local_rank, per_node = (_number(env, name) for name in names) if names else (0, 1, 0, 1)
    address = env.get("MASTER_ADDR") or job.master_addr
    port = _number(env, "MASTER_PORT") if env.get("MASTER_PORT") else job.master_port
    return Job(
        hosts=job.hosts, here=job.here, distribution=distribution, rank=rank, world=world, local_rank=local_rank,
        per_node=per_node, master=(address, port),
        instance=env.get("SM_CURRENT_INSTANCE_TYPE") or None,
    )  # fmt: skip


def rank_environment(job: Job, *, local_rank: int | None = None, per_node: int | None = None) -> dict[str, str]:
    """Torchrun's variables for one rank: this process's own, or one that it starts for a job without a distribution."""
    ranks_per_node = per_node if per_node is not None else job.per_node
    local = local_rank if local_rank is not None else job.local_rank
    rank = job.rank if per_node is None else job.index * ranks_per_node + local
    world = job.world if per_node is None else len(job.hosts) * ranks_per_node
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "GROUP_RANK": str(job.index), "GROUP_WORLD_SIZE": str(len(job.hosts)),
        "MASTER_ADDR": job.master[0], "MASTER_PORT": str(job.master[1]),
    }  # fmt: skip


def describe(job: Job, *, per_node: int, collectives: bool) -> dict[str, Any]:
    """Ranks of a host for the metrics file."""
    started = job.distribution == "none"
    return {
        "distribution": job.distribution,
        "world_size": len(job.hosts) * per_node if started else job.world,
        "rank": job.index * per_node if started else job.rank,
        "local_rank": 0 if started else job.local_rank,
        "processes_per_node": per_node if started else job.per_node,
        "collectives": collectives,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Parameters of the collectives for a number of ranks and hosts."""

    max_size: str
    stall_s: int  # without any progress


# Each rank sends one share of the message in each step of a ring: 64 MiB are far above the latency of any network.
_SHARE_MIB = 64
_SMALLEST_MIB, _BETWEEN_HOSTS_MIB, _LARGEST_MIB = 512, 2048, 16384  # published figures between hosts are for 2 GiB
_STALL_S, _STALL_BETWEEN_HOSTS_S = 120, 300


def scale(*, ranks: int, hosts: int) -> Scale:
    """Largest message and time limit: a power of two with 64 MiB per rank, 2 GiB at least between hosts.

    The time limit is 120 s on one host and 300 s between hosts, and 60 s more for each doubling above 4 hosts.
    """
    wanted = max(_SMALLEST_MIB if hosts == 1 else _BETWEEN_HOSTS_MIB, ranks * _SHARE_MIB)
    mib = min(1 << (wanted - 1).bit_length(), _LARGEST_MIB)
    doublings = max(0, (max(1, hosts) - 1).bit_length() - 2)
    stall_s = _STALL_S if hosts == 1 else _STALL_BETWEEN_HOSTS_S + 60 * doublings
    return Scale(max_size=f"{mib >> 10}G" if mib % 1024 == 0 else f"{mib}M", stall_s=stall_s)


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except KeyError:
        raise UsageError(f"{name} is not set beside the other variables of its launcher") from None
    except ValueError:
        raise UsageError(f"{name}={env[name][:40]} is no number") from None
