"""Candidate parts, and the parts that a pair test crosses.

Where the caller knows the routes (`ibtracert`, a static hash), every link and spine is a part of its own. Where it
does not, a bad uplink slows some pairs of a rack and always the same ones: the part is "an uplink of that leaf", and
which pairs cross it is worked out from the data (`scope="some"`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from trainmaster.bench.isolate.result import ANY_SPINE, ANY_SWITCH, ANY_UPLINK, Kind

Pair = tuple[str, str]
Route = Callable[[str, str], Sequence[tuple[Literal["link", "switch"], str]]]

# How often each kind is bad before anything is measured: assumptions, not field data. The verdict hardly depends on
# them: a slow result moves the odds ten-thousandfold. They decide between explanations that fit alike.
_PRIOR = {"node": 2e-3, "link": 5e-4, "switch": 2e-4}
_DASH = " – "  # between the two nodes of a path
_PAIRS_ASKED = 50_000  # routes asked for to learn the links
_PRIOR_PATH = 1e-6  # the path of one pair and nothing else: a wrong route entry; there are n²/2 of them


@dataclass(frozen=True, slots=True)
class Part:
    """A hypothesis: this part is bad, and the flows in its scope are slow.

    all: every flow through it. cross: a leaf whose in-rack flows stay fast. some: an unknown share of its flows, by
    pair, always the same pairs.
    """

    kind: Kind
    name: str
    scope: Literal["all", "cross", "some"] = "all"

    @property
    def prior(self) -> float:
        if self.is_path:
            return _PRIOR_PATH
        # A leaf has a handful of uplinks, so that "one of them" is a handful of times more likely than each.
        return _PRIOR[self.kind] * (4 if self.scope == "some" else 1)

    @property
    def is_path(self) -> bool:
        return self.kind == "link" and _DASH in self.name

    @property
    def identity(self) -> tuple[Kind, str]:
        """Two scopes of one switch are one answer."""
        return self.kind, self.name


class Topology:
    """Nodes, their racks and routes, as far as they are known."""

    def __init__(self, nodes: Sequence[str], racks: Mapping[str, str] | None, route: Route | None) -> None:
        self.nodes = list(nodes)
        self.racks = {node: racks[node] for node in nodes} if racks is not None else None
        self.route = route
        self.members: dict[str, list[str]] = {}
        for node in nodes:
            self.members.setdefault(self.racks[node] if self.racks is not None else "", []).append(node)

    @property
    def many_racks(self) -> bool:
        return len(self.members) > 1

    def crosses_racks(self, pair: Pair) -> bool:
        return self.racks is not None and self.racks[pair[0]] != self.racks[pair[1]]

    def parts(self, pair: Pair) -> list[Part]:
        """Every part whose fault this pair would, or might, show."""
        a, b = pair
        crossed = [Part("node", a), Part("node", b), path(pair)]
        if self.racks is None:
            # Nothing is known of the switches: "some pairs are slow, whoever takes part" is all that can be said.
            return [*crossed, Part("switch", ANY_SWITCH, "some")]
        if not self.crosses_racks(pair):
            # With one rack its switch takes part in every flow: that is the baseline, not a hypothesis.
            return [*crossed, Part("switch", self.racks[a])] if self.many_racks else crossed
        leaves = (self.racks[a], self.racks[b])
        crossed += [Part("switch", leaf, scope) for leaf in leaves for scope in ("all", "cross")]
        if self.route is not None:
            return crossed + [Part(kind, name) for kind, name in dict.fromkeys(self.route(a, b))]
        crossed += [Part("link", leaf + ANY_UPLINK, "some") for leaf in leaves]
        return [*crossed, Part("switch", ANY_SPINE, "some")]

    def known(self, rng: random.Random) -> list[Part]:
        """Every candidate part; paths of single pairs only once they were slow."""
        parts = [Part("node", node) for node in self.nodes]
        if self.racks is None:
            return [*parts, Part("switch", ANY_SWITCH, "some")]
        if not self.many_racks:
            return parts
        parts += [Part("switch", leaf, scope) for leaf in self.members for scope in ("all", "cross")]
        if self.route is None:
            parts += [Part("link", leaf + ANY_UPLINK, "some") for leaf in self.members]
            return [*parts, Part("switch", ANY_SPINE, "some")]
        pairs = [pair for pair in combinations(self.nodes, 2) if self.crosses_racks(pair)]
        if len(pairs) > _PAIRS_ASKED:  # links repeat long before pairs do
            pairs = rng.sample(pairs, _PAIRS_ASKED)
        return parts + [Part(kind, name) for kind, name in dict.fromkeys(p for a, b in pairs for p in self.route(a, b))]

    def shares(self, part: Part) -> tuple[float, ...]:
        """Shares of flows that one uplink or spine may carry: a half, a quarter …

        A leaf has at most one uplink per node where links are alike; more are not looked for.
        """
        if self.racks is None:
            most = min(len(self.nodes), 32)
        else:
            leaf = self.members.get(part.name.removesuffix(ANY_UPLINK))
            most = len(leaf) if leaf is not None else max(map(len, self.members.values()))
        return tuple(1 / 2**k for k in range(1, 7) if 2**k <= max(most, 2))


def path(pair: Pair) -> Part:
    """The path of one pair alone."""
    return Part("link", _DASH.join(sorted(pair)))
