"""Health of one node and of a cluster: planned checks, results, and nodes without an answer.

A node measures itself and writes a `NodeHealth`; `ClusterHealth` gathers them. Both travel as JSON (`to_json`,
`from_json`). A node without an answer is part of the result: it is never hidden by the verdict of the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainmaster.core import schema
from trainmaster.core.results import CheckResult, Overall, Verdict, demand, judge_overall

_WORST = (Overall.FAIL, Overall.INCOMPLETE, Overall.WARN, Overall.PASS)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealth:
    """Results of one node about itself."""

    node: str
    level: int
    planned: tuple[str, ...]
    results: tuple[CheckResult, ...]
    left_out: tuple[str, ...] = ()  # checks of the level that --only or --skip left out
    expect: Mapping[str, Any] = field(default_factory=dict)  # only what was stated or came from a profile
    profile: str | None = None  # the instance or GPU model it was judged as
    started_at: str = ""  # ISO, with its offset
    took_s: float = 0.0
    version: str = ""
    v: int = 1

    @property
    def overall(self) -> Overall:
        return judge_overall(self.results, planned=self.planned)

    def demanding(self) -> NodeHealth:
        """The same, where a check that left faults unseen is an error: `--strict`."""
        return replace(self, results=demand(self.results))


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """A planned node without a result: unreachable, hung, or with an unreadable answer."""

    node: str
    verdict: Verdict  # error: its state is unknown. Never pass, never skip.
    reason: str
    action: str
    took_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterHealth:
    """Results of all planned nodes, and of the comparisons between them."""

    asked: tuple[str, ...]  # every planned node, in the user's order
    nodes: tuple[NodeHealth, ...]
    silent: tuple[Silent, ...] = ()
    # Between nodes: drift from the majority, peer comparison, collectives. A finding's device names the node.
    cluster: tuple[CheckResult, ...] = ()
    started_at: str = ""
    took_s: float = 0.0
    notes: tuple[str, ...] = ()  # in the user's words: site, operator, ticket, addresses
    v: int = 1

    @property
    def overall(self) -> Overall:
        """The worst verdict; a planned node that is neither in `nodes` nor in `silent` makes it INCOMPLETE."""
        accounted = {node.node for node in self.nodes} | {node.node for node in self.silent}
        verdicts = [node.overall for node in self.nodes]
        # Comparisons that do not apply (too few nodes) do not lower the verdict.
        if any(result.verdict is not Verdict.SKIP for result in self.cluster):
            verdicts.append(judge_overall(self.cluster, planned=[result.check for result in self.cluster]))
        if self.silent or not self.nodes or not set(self.asked) <= accounted:
            verdicts.append(Overall.INCOMPLETE)
        return min(verdicts, key=_WORST.index)

    def demanding(self) -> ClusterHealth:
        """The same, where a check that left faults of a node unseen is an error: `--strict`."""
        return replace(self, nodes=tuple(node.demanding() for node in self.nodes))

    def to_plain(self) -> dict[str, Any]:
        return {**schema.to_plain(self), "overall": str(self.overall)}

    def to_json(self) -> str:
        return json.dumps(self.to_plain(), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ClusterHealth:
        plain = json.loads(text)
        if isinstance(plain, dict):
            plain.pop("overall", None)  # computed again, never trusted
        return schema.build(cls, plain)
