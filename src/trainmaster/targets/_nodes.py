"""Node contract: programs on the nodes of a target, node by node. Each `targets/*/nodes.py` implements it.

access = target.open_nodes(limit_s=600.0, home=home)
for node in await access.nodes():
    results = await access.run(node, [Program(module="platform")], timeout_s=60.0)
await access.close()                        in a `finally`: the nodes may be held until then
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of a target, as the target describes it."""

    name: str
    address: str | None = None  # where other nodes reach it; None: as the node itself says
    gpus: int | None = None  # in working order; None: the target does not say
    installed: int | None = None  # GPUs, also broken ones
    closed: str | None = None  # why nothing can be measured there now
    rack: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program of the node half to start on a node: `python -m MODULE WORDS`, with additional variables."""

    module: str
    words: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    captures: bool = False  # it gets `--capture FOLDER`, and the files that it writes there come back


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a program ended. code None: still running at the deadline, or stopped; see `state`."""

    code: int | None
    state: str | None  # the letter of /proc/PID/stat of a program that had not ended
    out: str
    err: str  # the end of standard error
    files: Mapping[str, str] = field(default_factory=dict)  # path → text, of a program that captures


@dataclass(slots=True, kw_only=True)
class Transfer:
    """Bytes moved to and from the nodes."""

    sent_bytes: int = 0
    received_bytes: int = 0


class NodeAccess(Protocol):
    """Way to start programs on the nodes of a target. Usable in one event loop at a time."""

    transfer: Transfer

    async def nodes(self) -> list[Node]:
        """Every node that belongs to the target, closed ones too; at least one. The first call removes what killed
        runs of the same home have left at the target."""

    async def run(self, node: Node, programs: Sequence[Program], timeout_s: float) -> list[Result]:
        """Results of programs that run at once on a node, until the last has ended or the time is over.

        NodeUnavailable without its answer. Cancelling ends them there.
        """

    async def close(self) -> None:
        """Give every node back and remove everything that was made."""


@runtime_checkable
class ReachesNodes(Protocol):
    """A target whose nodes can be reached one by one."""

    def open_nodes(self, *, limit_s: float, home: Path, retest: bool = False) -> NodeAccess:
        """The way to its nodes. What it makes there carries the mark of the home folder, and ends after `limit_s`.

        `retest`: one program per node and no more; nodes that Trainmaster has drained are opened for it.
        """
