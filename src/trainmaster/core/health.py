"""The health of one node and of a cluster: what was planned, what every node said, who did not answer.

A node measures alone and writes a `NodeHealth`; the machine that asked gathers them into a `ClusterHealth`. Both cross
borders as JSON (`to_json`, `from_json`). A node that was asked and did not answer is part of the result, not absent
from it: one hung node never hides behind the verdict of the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainmaster.core import schema
from trainmaster.core.results import CheckResult, Overall, Verdict, judge_overall

_WORST = (Overall.FAIL, Overall.INCOMPLETE, Overall.WARN, Overall.PASS)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealth:
    """What one node measured of itself."""

    node: str
    level: int
    planned: tuple[str, ...]
    results: tuple[CheckResult, ...]
    expect: Mapping[str, Any] = field(default_factory=dict)  # only what was stated or came from a profile
    profile: str | None = None  # the instance or GPU model it was judged as
    started_at: str = ""  # ISO, with its offset
    took_s: float = 0.0
    version: str = ""
    v: int = 1

    @property
    def overall(self) -> Overall:
        return judge_overall(self.results, planned=self.planned)


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """A node that was asked and gave no result: unreachable, hung, or its answer could not be understood."""

    node: str
    verdict: Verdict  # error: nobody knows how it is. Never pass, never skip.
    reason: str
    action: str
    took_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterHealth:
    """Everything that is known about the nodes that were asked."""

    asked: tuple[str, ...]  # every node, in the order the user named them
    nodes: tuple[NodeHealth, ...]
    silent: tuple[Silent, ...] = ()
    # Between nodes: drift from the majority, peer comparison, collectives. A finding's device names the node.
    cluster: tuple[CheckResult, ...] = ()
    started_at: str = ""
    took_s: float = 0.0
    v: int = 1

    @property
    def overall(self) -> Overall:
        """The worst of all; a node that was asked and is neither heard nor named silent is INCOMPLETE too."""
        heard = {node.node for node in self.nodes} | {node.node for node in self.silent}
        found = [node.overall for node in self.nodes]
        # Comparisons that do not apply (too few nodes) take nothing from what the nodes measured.
        if any(result.verdict is not Verdict.SKIP for result in self.cluster):
            found.append(judge_overall(self.cluster, planned=[result.check for result in self.cluster]))
        if self.silent or not self.nodes or not set(self.asked) <= heard:
            found.append(Overall.INCOMPLETE)
        return min(found, key=_WORST.index)

    def to_plain(self) -> dict[str, Any]:
        return {**schema.to_plain(self), "overall": str(self.overall)}

    def to_json(self) -> str:
        return json.dumps(self.to_plain(), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ClusterHealth:
        plain = json.loads(text)
        if isinstance(plain, dict):
            plain.pop("overall", None)  # judged again, never believed
        return schema.build(cls, plain)
