"""Rank, world size and node of this process, read from the launcher's environment.

A launcher that starts one process per rank (torchrun, Slurm, Flux, Open MPI, MPICH, Intel MPI, MVAPICH, jsrun, our
agent) sets the rank. One that starts one process per node (Kubeflow pods, PET_*, SageMaker) sets the node; the ranks
are still to be started there, so `rank` and `local_rank` are None.

Where no other launcher is seen, unset variables have defaults: RANK 0, WORLD_SIZE 1, LOCAL_RANK 0, for several ranks on
one machine MASTER_ADDR localhost, and MASTER_PORT 29500. SageMaker's have theirs (core/vendors/sagemaker_hosts.py). An
environment that contradicts itself, or comes from a launcher that cannot be read, is refused by the names of its
variables: a wrong guess here is a job that hangs, or two jobs that each take themselves for the whole one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal, NoReturn

from trainmaster.core.errors import UsageError
from trainmaster.core.loopback import is_loopback_host
from trainmaster.core.vendors.sagemaker_hosts import NAMES as SAGEMAKER_NAMES
from trainmaster.core.vendors.sagemaker_hosts import list_hosts, read_hosts, read_port

Launcher = Literal[
    "torchrun", "mpi", "mpich", "mvapich", "jsrun", "flux", "slurm", "pet", "kubeflow", "sagemaker", "single"
]
Env = Mapping[str, str]

DEFAULT_PORT = 29500  # torchrun's
_SLURM_PORTS = (20_000, 10_000)  # first and count: below the kernel's ephemeral ports, which start at 32768
_MAX_HOSTS = 100_000
_NAMES_OF_COUNTS = {"torchrun": " (WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_WORLD_SIZE)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Identity of this process. None: the launcher started a node, and the ranks are still to be started on it."""

    rank: int | None
    world_size: int | None
    local_rank: int | None
    local_world_size: int | None
    node_rank: int
    nodes: int
    master_addr: str | None  # None only where one process is the whole job
    master_port: int | None
    launcher: Launcher
    restart: int = 0  # times that the launcher has restarted its ranks


def detect(env: Env) -> Ranks:
    """Detect the launcher; UsageError if the environment is contradictory.

    Launchers nest (torchrun inside a Slurm task inside a pod), so the innermost is asked first. LOCAL_RANK is what
    tells a rank of torchrun from a Kubeflow pod: both have RANK and WORLD_SIZE, but the pod's count pods.
    """
    family = next((candidate for candidate in _MPI_FAMILIES if any(name in env for name in candidate.names[:2])), None)
    if "LOCAL_RANK" in env:
        ranks = _torchrun(env)
    elif family is not None and (family.own_local_rank or "MPI_LOCALRANKID" in env):
        ranks = _mpi(env, family)
    elif "FLUX_TASK_RANK" in env:
        ranks = _flux(env)
    elif "SLURM_PROCID" in env and _is_slurm_task(env):
        ranks = _slurm(env)
    elif family is not None:
        ranks = _mpi(env, family)
    elif "PET_NNODES" in env or "PET_NODE_RANK" in env:
        ranks = _pet(env)
    elif "RANK" in env and "WORLD_SIZE" in env and "MASTER_ADDR" in env:
        ranks = _kubeflow(env)
    elif "RANK" in env or "WORLD_SIZE" in env:
        ranks = _torchrun(env)
    elif any(name in env for name in SAGEMAKER_NAMES):
        ranks = _sagemaker(env)
    else:
        ranks = _single(env)
    return _checked(ranks)


def _torchrun(env: Env) -> Ranks:
    """Ranks in torchrun's variables. Unset ones have its defaults where no other value is possible: a single rank."""
    world, local_rank = _count(env, "WORLD_SIZE", default=1), _count(env, "LOCAL_RANK", default=0)
    if world > 1 and "RANK" not in env:
        _refuse(f"WORLD_SIZE={world} but RANK is not set; every rank must know its number")
    if world > 1 and "LOCAL_RANK" not in env:
        _refuse(f"WORLD_SIZE={world} but LOCAL_RANK is not set; a pod of Kubeflow has MASTER_ADDR beside RANK")
    rank = _count(env, "RANK", default=0)
    if rank >= world and "WORLD_SIZE" not in env:
        _refuse(f"RANK={rank} but WORLD_SIZE is not set, which means 1")
    address = env.get("MASTER_ADDR")
    if "LOCAL_WORLD_SIZE" not in env and world > 1 and not (address is None or is_loopback_host(address)):
        _refuse(
            f"LOCAL_WORLD_SIZE is not set, and MASTER_ADDR={address} may be another machine; set it to the number of "
            "ranks on this node"
        )
    local_world = _count(env, "LOCAL_WORLD_SIZE", default=world)
    nodes = _count(env, "GROUP_WORLD_SIZE") if "GROUP_WORLD_SIZE" in env else None
    if nodes is None:
        if not local_world or world % local_world:
            _refuse(f"WORLD_SIZE={world} is not a multiple of LOCAL_WORLD_SIZE={local_world}; set GROUP_WORLD_SIZE")
        nodes = world // local_world
    node_rank = _count(env, "GROUP_RANK") if "GROUP_RANK" in env else None
    if node_rank is None:
        node_rank = _block(rank, local_rank, local_world, "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    master, port = _master_or_local(_with_port(env), world=world, nodes=nodes)
    return Ranks(
        rank=rank, world_size=world, local_rank=local_rank, local_world_size=local_world,
        node_rank=node_rank, nodes=nodes, master_addr=master, master_port=port, launcher="torchrun",
        restart=_count(env, "TORCHELASTIC_RESTART_COUNT", default=0),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Variables of one MPI launcher: rank, size, local rank, local size."""

    launcher: Launcher
    names: tuple[str, str, str, str]
    own_local_rank: bool = True  # False: Slurm's PMI sets rank and size too, without a local rank


def _names(prefix: str) -> tuple[str, str, str, str]:
    return f"{prefix}_RANK", f"{prefix}_SIZE", f"{prefix}_LOCAL_RANK", f"{prefix}_LOCAL_SIZE"


# Open MPI and Spectrum MPI; MVAPICH2, MVAPICH 3; IBM's jsrun; Hydra, the launcher of MPICH and Intel MPI.
_MPI_FAMILIES = (
    _Family(launcher="mpi", names=_names("OMPI_COMM_WORLD")),
    _Family(launcher="mvapich", names=_names("MV2_COMM_WORLD")),
    _Family(launcher="mvapich", names=_names("MVP_COMM_WORLD")),
    _Family(launcher="jsrun", names=_names("JSM_NAMESPACE")),
    _Family(
        launcher="mpich", names=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), own_local_rank=False
    ),
)
# Set for each task beside its rank. Alone they would make every task rank 0 of 1.
_TASK_VARIABLES = (
    *(family.names[2] for family in _MPI_FAMILIES), "FLUX_TASK_LOCAL_ID", "PALS_LOCAL_RANKID", "PMIX_NAMESPACE",
    "SLURM_STEP_ID", "SLURM_STEPID",
)  # fmt: skip
# Set by launchers whose ranks we cannot read: PMIx and PALS set no number of ranks, the others are not known well
# enough.
_UNREADABLE = ("PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE", "PMI_ID")


def _mpi(env: Env, family: _Family) -> Ranks:
    names = family.names
    rank, world, local_rank, local_world = (_count(env, name) for name in names)
    if not local_world or world % local_world:
        _refuse(f"{names[1]}={world} is not a multiple of {names[3]}={local_world}: nodes with unequal ranks")
    _agree(env, rank=rank, world=world)
    # OMPI_COMM_WORLD_NODE_RANK is no node's number but a second local rank; the node follows from the default mapping.
    node_rank = _block(rank, local_rank, local_world, names[0], names[2], names[3])
    address, port = _master_or_local(env, world=world, nodes=world // local_world)
    return Ranks(
        rank=rank, world_size=world, local_rank=local_rank, local_world_size=local_world, node_rank=node_rank,
        nodes=world // local_world, master_addr=address, master_port=port, launcher=family.launcher,
    )  # fmt: skip


def _flux(env: Env) -> Ranks:
    """A task of Flux; its job shell sets these four (flux-core, src/shell/task.c), and PMI_RANK and PMI_SIZE beside."""
    names = ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES")
    rank, world, local_rank, nodes = (_count(env, name) for name in names)
    if not nodes or world % nodes:
        _refuse(f"FLUX_JOB_SIZE={world} is not a multiple of FLUX_JOB_NNODES={nodes}: nodes with unequal ranks")
    _agree(env, rank=rank, world=world)
    node_rank = _block(rank, local_rank, world // nodes, "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "ranks per node")
    address, port = _master_or_local(env, world=world, nodes=nodes)
    return Ranks(
        rank=rank, world_size=world, local_rank=local_rank, local_world_size=world // nodes, node_rank=node_rank,
        nodes=nodes, master_addr=address, master_port=port, launcher="flux",
    )  # fmt: skip


def _is_slurm_task(env: Env) -> bool:
    """A task of srun, not the batch script, which also has SLURM_PROCID=0 but is alone."""
    if "SLURM_STEP_ID" in env or "SLURM_STEPID" in env:
        return True
    if _count(env, "SLURM_NTASKS", default=1) > 1 and "RANK" not in env and "PET_NNODES" not in env:
        _refuse(
            f"SLURM_NTASKS={env['SLURM_NTASKS']} but SLURM_STEP_ID is not set: this is the batch script, not one of "
            "its tasks; start the program with srun"
        )
    return False


def _slurm(env: Env) -> Ranks:
    rank, local_rank = _count(env, "SLURM_PROCID"), _count(env, "SLURM_LOCALID")
    # The step's own numbers first: a step may use fewer nodes and tasks than its job.
    world = _count(env, _first(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"))
    list_name = _first(env, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    hosts = expand_hosts(env[list_name], name=list_name)
    nodes = len(hosts)
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"):
        if name in env:
            if _count(env, name) != nodes:
                _refuse(f"{name}={env[name]} but {list_name}={env[list_name]} names {nodes}")
            break
    node_rank = _count(env, "SLURM_NODEID", default=0 if nodes == 1 else None)
    if node_rank >= nodes:
        _refuse(f"SLURM_NODEID={node_rank} but {list_name}={env[list_name]} names {nodes}")
    if nodes == 1:
        per_node = [world]
    else:
        tasks_name = _first(env, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
        per_node = _tasks(env[tasks_name], name=tasks_name)
        if len(per_node) != nodes or sum(per_node) != world:
            _refuse(f"{tasks_name}={env[tasks_name]:.80} does not give {world} tasks on {nodes} nodes")
    _agree(env, rank=rank, world=world)
    address, port = _master(env, needed=False)
    if port is None and "SLURM_JOB_ID" in env:
        # Every task computes the same one, and two jobs on one node rarely do.
        port = _SLURM_PORTS[0] + _count(env, "SLURM_JOB_ID") % _SLURM_PORTS[1]
    return Ranks(
        rank=rank, world_size=world, local_rank=local_rank, local_world_size=per_node[node_rank], node_rank=node_rank,
        nodes=nodes, master_addr=address or hosts[0], master_port=port, launcher="slurm",
    )  # fmt: skip


def _pet(env: Env) -> Ranks:
    """What torchrun would read as its options (Kubeflow 2, and PyTorchJob since 1.7): one process per node so far."""
    if ":" in env.get("PET_NNODES", ""):
        _refuse(f"PET_NNODES={env['PET_NNODES']} is a range: only torchrun's rendezvous knows the number; use torchrun")
    nodes = _count(env, "PET_NNODES")
    node_rank = _count(env, "PET_NODE_RANK", default=0 if nodes == 1 else None)
    word = env.get("PET_NPROC_PER_NODE", "auto")
    per_node = None if word in ("auto", "gpu", "cpu") else _count(env, "PET_NPROC_PER_NODE")
    # PyTorchJob sets RANK and WORLD_SIZE beside them: pods, or (newer) pods × processes.
    worlds = {nodes, nodes * (per_node or 1)}
    if "RANK" in env and _count(env, "RANK") != node_rank:
        _refuse(f"RANK={env['RANK']} but PET_NODE_RANK={node_rank}, and LOCAL_RANK is not set")
    if "WORLD_SIZE" in env and _count(env, "WORLD_SIZE") not in worlds:
        _refuse(f"WORLD_SIZE={env['WORLD_SIZE']} but PET_NNODES={nodes} and PET_NPROC_PER_NODE={word}")
    address, port = _master(env, needed=nodes > 1, prefix="PET_")
    return Ranks(
        rank=None, world_size=nodes * per_node if per_node else None, local_rank=None, local_world_size=per_node,
        node_rank=node_rank, nodes=nodes, master_addr=address, master_port=port, launcher="pet",
    )  # fmt: skip


def _kubeflow(env: Env) -> Ranks:
    """A pod of a PyTorchJob: RANK and WORLD_SIZE count pods; the number of processes of each is not stated."""
    node_rank, nodes = _count(env, "RANK"), _count(env, "WORLD_SIZE")
    address, port = _master(_with_port(env), needed=True)
    return Ranks(
        rank=None, world_size=None, local_rank=None, local_world_size=None,
        node_rank=node_rank, nodes=nodes, master_addr=address, master_port=port, launcher="kubeflow",
    )  # fmt: skip


def _sagemaker(env: Env) -> Ranks:
    """A host of a SageMaker job. Without SM_NUM_GPUS the number of ranks on it is not known yet."""
    try:
        job = read_hosts(env)
    except UsageError as error:
        _refuse(str(error))
    # An instance without GPUs runs one process.
    per_node = max(1, _count(env, "SM_NUM_GPUS")) if "SM_NUM_GPUS" in env else None
    address, port = _master(env, needed=False)
    return Ranks(
        rank=None, world_size=len(job.hosts) * per_node if per_node else None, local_rank=None,
        local_world_size=per_node, node_rank=job.index, nodes=len(job.hosts), master_addr=address or job.master_addr,
        master_port=port or job.master_port, launcher="sagemaker",
    )  # fmt: skip


def _single(env: Env) -> Ranks:
    """One process without a launcher. MASTER_ADDR and MASTER_PORT alone change nothing: there is no other rank."""
    foreign = next((name for name in _UNREADABLE if name in env), None)
    if foreign is not None:
        _refuse(
            f"{foreign}={env[foreign]} is a launcher's, but the number of ranks or the local rank is not known; set "
            "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    # A shell in an allocation, and a batch script, have the job's id: one process, beside the tasks of the job.
    slurm = () if "SLURM_JOB_ID" in env and env.get("SLURM_PROCID", "0") == "0" else ("SLURM_PROCID", "SLURM_NTASKS")
    part = next((name for name in (*_TASK_VARIABLES, "NODE_RANK", *slurm) if name in env), None)
    if part is not None:
        _refuse(
            f"{part}={env[part]} is a launcher's, one of several processes, but what would tell which one is not set "
            "(RANK, WORLD_SIZE and LOCAL_RANK; or SLURM_STEP_ID, which srun sets); set all of them or none"
        )
    alone = {"LOCAL_WORLD_SIZE": ("0", "1"), "GROUP_RANK": ("0",), "GROUP_WORLD_SIZE": ("1",)}
    strays = [name for name, values in alone.items() if env.get(name, values[0]) not in values]
    if strays:
        _refuse(f"{', '.join(strays)} set, but not RANK, WORLD_SIZE and LOCAL_RANK; set all of them or none")
    _master(env, needed=False)
    return Ranks(
        rank=0, world_size=1, local_rank=0, local_world_size=1,
        node_rank=0, nodes=1, master_addr=None, master_port=None, launcher="single",
    )  # fmt: skip


def expand_hosts(text: str, *, name: str = "SLURM_NODELIST") -> list[str]:
    """The hosts of a Slurm list, in its order: `n[1-3,07-09],x` is n1 n2 n3 n07 n08 n09 x."""
    # Commas inside brackets belong to a range, not to the list.
    words = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if not words or ",".join(words) != text:
        _refuse(f"{name}={text!r} is not a list of hosts")
    hosts: list[str] = []
    for word in words:
        # Odd pieces are the insides of brackets; a name may have several (rack[1-2]node[1-8]).
        pieces = re.split(r"\[([^\]]*)\]", word)
        choices = [_range(piece, name) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        if len(hosts) + math.prod(map(len, choices)) > _MAX_HOSTS:
            _refuse(f"{name} names more than {_MAX_HOSTS} hosts")
        hosts += ["".join(parts) for parts in product(*choices)]
    return hosts


def _range(text: str, name: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", part, flags=re.ASCII)
        if not match:
            _refuse(f"{name}: [{text:.80}] is not a range of numbers")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) > _MAX_HOSTS:
            _refuse(f"{name}: [{text}] is not a range of numbers")
        # Zeros in front are part of the name: 07 is not 7.
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _tasks(text: str, *, name: str) -> list[int]:
    """Slurm's tasks per node: `2(x3),1` is 2 2 2 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,18})(?:\(x(\d{1,18})\))?", part, flags=re.ASCII)
        if not match or int(match[2] or 1) > _MAX_HOSTS:
            _refuse(f"{name}={text:.80} is not a list such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _block(rank: int, local_rank: int, local_world: int, *names: str) -> int:
    """The node of a rank where each node holds a block of ranks that follow each other."""
    if not local_world or rank % local_world != local_rank:
        shown = ", ".join(f"{name}={value}" for name, value in zip(names, (rank, local_rank, local_world), strict=True))
        _refuse(f"{shown}: ranks do not follow each other on each node, so the node is not known; set GROUP_RANK")
    return rank // local_world


def _agree(env: Env, *, rank: int, world: int) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", world)):
        if name in env and _count(env, name) != value:
            _refuse(f"{name}={env[name]} contradicts the launcher's {value}, and LOCAL_RANK is not set; unset {name}")


def _master_or_local(env: Env, *, world: int, nodes: int) -> tuple[str | None, int | None]:
    """Rendezvous of ranks that a launcher numbered: stated, SageMaker's first host, or on this machine."""
    if world > 1 and "MASTER_ADDR" not in env and ("SM_MASTER_ADDR" in env or "SM_HOSTS" in env):
        try:
            return env.get("SM_MASTER_ADDR") or list_hosts(env)[0], read_port(env)
        except UsageError as error:
            _refuse(str(error))
    address, port = _master(env, needed=nodes > 1)
    if world == 1:
        return address, port
    return address or "localhost", port if port is not None else DEFAULT_PORT


def _with_port(env: Env) -> Env:
    """The environment with torchrun's default port beside a stated address: every rank computes the same."""
    return {"MASTER_PORT": str(DEFAULT_PORT), **env} if "MASTER_ADDR" in env else env


def _master(env: Env, *, needed: bool, prefix: str = "") -> tuple[str | None, int | None]:
    names = [next((n for n in (prefix + base, base) if n in env), base) for base in ("MASTER_ADDR", "MASTER_PORT")]
    if needed:
        missing = [name for name in names if name not in env]
        if missing:
            _refuse(f"{' and '.join(missing)} not set; every rank must know where rank 0 listens")
    port = _count(env, names[1]) if names[1] in env else None
    if port is not None and not 0 < port < 1 << 16:
        _refuse(f"{names[1]}={port} is not a port")
    return _text(env, names[0]) if names[0] in env else None, port


def _checked(ranks: Ranks) -> Ranks:
    """Bounds that hold whatever the launcher."""
    for what, number, count in (
        ("rank", ranks.rank, ranks.world_size),
        ("local rank", ranks.local_rank, ranks.local_world_size),
        ("node rank", ranks.node_rank, ranks.nodes),
    ):
        if count is not None and (count < 1 or (number is not None and number >= count)):
            _refuse(f"{ranks.launcher} says {what} {number} of {count}; the last one is {count - 1}")
    world, here, nodes = ranks.world_size, ranks.local_world_size or 1, ranks.nodes
    # Nodes may have unequal numbers of ranks, but none has no rank.
    if world is not None and (here + nodes - 1 > world or (nodes == 1 and here != world)):
        _refuse(
            f"{ranks.launcher} says {world} ranks in all, {here} of them on this node, and {nodes} nodes"
            f"{_NAMES_OF_COUNTS.get(ranks.launcher, '')}: these contradict each other; correct the wrong one"
        )
    return ranks


def _first(env: Env, *names: str) -> str:
    for name in names:
        if name in env:
            return name
    _refuse(f"none of {', '.join(names)} is set")


def _text(env: Env, name: str) -> str:
    if not env.get(name):
        _refuse(f"{name} is {'empty' if name in env else 'not set'}")
    return env[name]


def _count(env: Env, name: str, *, default: int | None = None) -> int:
    if name not in env and default is not None:
        return default
    text = _text(env, name)
    if not re.fullmatch(r"\d{1,18}", text, flags=re.ASCII):
        _refuse(f"{name}={text!r:.80} is not a whole number of at most 18 digits")
    return int(text)


def _refuse(message: str) -> NoReturn:
    raise UsageError(f"rank environment: {message}")
