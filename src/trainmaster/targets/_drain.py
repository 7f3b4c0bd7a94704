"""Commands of a scheduler that drain and resume a node, as argument lists, and parsers of their answers.

cluster/drain.py runs them. A target whose traits say `drains` has `create_scheduler(options)` beside its `create`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

PREFIX = "trainmaster:"  # prefix of every reason set here; a node drained with another reason is left alone

Command = tuple[str, ...]
RunCommand = Callable[[Sequence[str]], Awaitable[str]]  # standard output of a command; TargetError where it fails


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainState:
    """Whether the scheduler keeps work from a node, and its stated reason."""

    out: bool
    reason: str
    at: str = field(default="", compare=False)  # ISO, when the reason was set; empty where it is not told

    @property
    def ours(self) -> bool:
        return self.out and self.reason.startswith(PREFIX)


class Scheduler(Protocol):
    """Commands that take a node out of service and back. Pure: `parse` turns an answer into a `DrainState`."""

    run: RunCommand | None  # where its programs are; None: on this machine

    def drain(self, node: str, reason: str) -> list[Command]: ...

    def resume(self, node: str) -> list[Command]: ...

    def query(self, node: str) -> Command: ...

    def parse(self, node: str, answer: str) -> DrainState: ...


@runtime_checkable
class ListsDrained(Protocol):
    """A scheduler that lists the nodes which jobs have drained themselves: no journal has those."""

    def query_all(self) -> Command: ...

    def parse_all(self, answer: str) -> dict[str, DrainState]: ...
