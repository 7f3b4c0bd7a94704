"""Cluster job contract: one program on all nodes of a target at once, as one job of its own.

planned = await target.plan_cluster_job(job, home=home, folder=folder)
if not planned.missing:
    end = await planned.run(on_note)        everything it made is removed, also where this is cancelled
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJob:
    """A program for every node: `python -m MODULE WORDS`, one process per GPU."""

    name: str
    app: str  # what it is, as labels and queues show it
    module: str
    words: tuple[str, ...]
    limit_s: float  # with its start
    processes: int | None = None  # of each node; None: one per GPU
    uses_gpus: bool = True
    nodes: int | None = None  # how many, where the target makes them
    gpus_of: Callable[[str], int | None] = lambda _kind: None  # GPUs of an instance type


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJobEnd:
    """How a cluster job ended."""

    out: str  # of rank 0, or of all ranks
    code: int | None  # of rank 0
    note: str  # how it ended without a result, for a sentence
    action: str
    highest: bool = False  # `code` is the highest of all ranks
    failed_rank: str | None = None  # the rank that ended badly, where it is known


class PlannedClusterJob(Protocol):
    """A cluster job that can be started, or the nodes that cannot take part."""

    missing: Mapping[str, tuple[str, str]]  # node → reason and action
    world: int  # ranks; where nodes are missing, nodes

    def render(self) -> str:
        """What would be created, as text."""

    async def run(self, on_note: Note) -> ClusterJobEnd:
        """Run it to its end. `on_note` tells what has to be kept: the job's name, its cost."""


@runtime_checkable
class RunsClusterJobs(Protocol):
    """A target that runs a program on all its nodes as one job."""

    async def plan_cluster_job(self, job: ClusterJob, *, home: Path, folder: Path) -> PlannedClusterJob:
        """The job on the nodes that the target has now. `folder` is for its files here. Creates nothing."""


def find_unequal(gpus: Mapping[str, int]) -> dict[str, tuple[str, str]]:
    """Reason and action for every node with fewer GPUs than others: with as many ranks everywhere, GPUs of the others
    would not be measured."""
    most = max(gpus.values(), default=0)
    action = "find the missing GPUs, or state the GPUs to use of every node with --processes"
    return {
        name: (f"{count} GPUs, while other nodes have {most}", action) for name, count in gpus.items() if count < most
    }
