"""A leaf/spine fabric with faults: what concurrent pair tests would measure on it.

    n nodes, in racks; one leaf switch per rack; every leaf linked to every spine
    n001 ── leaf00 ── n002                    a flow inside a rack
    n001 ── leaf00 ── spine3 ── leaf05 ── n081    a flow between racks; the spine is a hash of the two names

Modelled: a flow runs at the speed of its worst part; every result is multiplied by exp(N(0, noise)), so its median is
the true speed; a part that is dead gives no answer. Both directions of a pair take one path, and take it every time,
as static routing does. Modelled on request: rare one-off slow results (`glitch`), lasting differences between healthy
nodes (`spread`), and flows that share an uplink (`uplink_flows`: this many run at full speed, more share it).
Not modelled: several rails per node, adaptive routing, traffic of other jobs.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from trainmaster.core.errors import UsageError

FaultKind = Literal["node", "link", "leaf", "leaf-all", "spine", "pair"]
Part = tuple[Literal["link", "switch"], str]  # one part a flow crosses between two leaves

_EXAMPLE = "nodes=256,racks=16,fault=node:n017:0.5,seed=3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One bad part. `loss` 0.5 halves every flow through it; 1.0 is dead: no answer.

    node: its adapter, bus or cable, so every flow of it. link: an uplink, `leaf05-spine3`. leaf: the switch's uplink
    side, flows inside the rack stay fast. leaf-all: the whole switch. pair: the path of one pair alone.
    """

    kind: FaultKind
    name: str
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How big the fabric is, how its results scatter, and what is wrong with it."""

    nodes: int = 256
    racks: int = 16
    spines: int = 8
    gbps: float = 48.0
    noise: float = 0.05
    spread: float = 0.0
    glitch: float = 0.0
    uplink_flows: int | None = None
    seed: int = 0
    faults: tuple[Fault, ...] = field(default=())


class Fabric:
    """Answers rounds of pair tests. The same shape gives the same answers to the same questions."""

    def __init__(self, shape: Shape) -> None:
        _check(shape)
        self.shape = shape
        digits = max(3, len(str(shape.nodes - 1)))
        self.nodes = [f"n{i:0{digits}d}" for i in range(shape.nodes)]
        # Racks fill evenly; the first ones take the rest.
        self.racks: Mapping[str, str] = {
            node: f"leaf{i * shape.racks // shape.nodes:02d}" for i, node in enumerate(self.nodes)
        }
        leaves = set(self.racks.values())
        known = {
            "node": set(self.nodes),
            "link": {f"{leaf}-spine{s}" for leaf in leaves for s in range(shape.spines)},
            "leaf": leaves,
            "leaf-all": leaves,
            "spine": {f"spine{s}" for s in range(shape.spines)},
            "pair": {"-".join(pair) for pair in _pairs(self.nodes, shape.faults)},
        }
        for fault in shape.faults:
            if fault.name not in known[fault.kind]:
                examples = ", ".join(sorted(known[fault.kind])[:3]) or "n000-n001"
                raise UsageError(f"fault {fault.kind}:{fault.name}: there is no such part; there are {examples} …")
        self._random = random.Random(f"fabric {shape.seed}")  # noqa: S311 (a simulation, not a secret)
        self._lasting = {node: math.exp(self._random.gauss(0, shape.spread)) for node in self.nodes}

    def route(self, a: str, b: str) -> tuple[Part, ...]:
        """The links and spine a flow crosses between two leaves; nothing inside a rack."""
        if self.racks[a] == self.racks[b]:
            return ()
        key = "|".join(sorted((a, b))).encode()
        spine = f"spine{int.from_bytes(hashlib.sha256(key).digest()[:4], 'big') % self.shape.spines}"
        return ("link", f"{self.racks[a]}-{spine}"), ("switch", spine), ("link", f"{self.racks[b]}-{spine}")

    def measure(self, pairs: Sequence[tuple[str, str]]) -> list[float | None]:
        """One round of concurrent pair tests: GB/s of each, or None where there was no answer."""
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy)), "a node takes part in one test at a time"
        load = Counter(part for a, b in pairs for part in self.route(a, b) if part[0] == "link")
        return [self._one(a, b, load) for a, b in pairs]

    def _one(self, a: str, b: str, load: Counter[Part]) -> float | None:
        speed = min((1 - fault.loss for fault in self.shape.faults if self._crosses(fault, a, b)), default=1.0)
        if self.shape.uplink_flows is not None:
            speed = min([speed, *(self.shape.uplink_flows / load[p] for p in self.route(a, b) if p[0] == "link")])
        noise = math.exp(self._random.gauss(0, self.shape.noise))
        if self._random.random() < self.shape.glitch:
            noise *= self._random.uniform(0.2, 0.9)
        if speed <= 0:
            return None
        return self.shape.gbps * speed * noise * min(self._lasting[a], self._lasting[b])

    def _crosses(self, fault: Fault, a: str, b: str) -> bool:
        inside = self.racks[a] == self.racks[b]
        match fault.kind:
            case "node":
                return fault.name in (a, b)
            case "pair":
                return fault.name in (f"{a}-{b}", f"{b}-{a}")
            case "leaf":
                return not inside and fault.name in (self.racks[a], self.racks[b])
            case "leaf-all":
                return fault.name in (self.racks[a], self.racks[b])
            case "link" | "spine":
                return any(name == fault.name for _, name in self.route(a, b))


def parse(text: str) -> Shape:
    """A shape from words: `nodes=256,racks=16,fault=node:n017:0.5,seed=3`; `fault` may stand more than once."""
    shape, faults = Shape(), []
    for word in filter(None, (word.strip() for word in text.split(","))):
        key, _, value = word.partition("=")
        try:
            match key:
                case "nodes" | "racks" | "spines" | "seed" | "uplink_flows":
                    shape = replace(shape, **{key: int(value)})  # type: ignore[arg-type]
                case "gbps" | "noise" | "spread" | "glitch":
                    shape = replace(shape, **{key: float(value)})  # type: ignore[arg-type]
                case "fault":
                    faults.append(_parse_fault(value))
                case _:
                    raise UsageError(f"--sim {word!r}: no such word; write it like {_EXAMPLE}")
        except ValueError:
            raise UsageError(f"--sim {word!r}: not a number; write it like {_EXAMPLE}") from None
    shape = replace(shape, faults=tuple(faults))
    _check(shape)
    return shape


def _parse_fault(text: str) -> Fault:
    kind, _, rest = text.partition(":")
    name, _, loss = rest.partition(":")
    match kind:
        case "dead":
            return Fault(kind="node", name=name, loss=1.0)
        case "node" | "link" | "leaf" | "leaf-all" | "spine" | "pair":
            return Fault(kind=kind, name=name, loss=float(loss or 0.5))
        case _:
            kinds = "node, dead, link, leaf, leaf-all, spine, pair"
            raise UsageError(f"--sim fault={text!r}: the kind is one of {kinds}; for example fault=node:n017:0.5")


def _pairs(nodes: Sequence[str], faults: Sequence[Fault]) -> list[tuple[str, ...]]:
    """The pairs that pair faults name, where both nodes are there."""
    named = [tuple(fault.name.split("-")) for fault in faults if fault.kind == "pair"]
    return [pair for pair in named if len(set(pair)) == 2 and set(pair) <= set(nodes)]


def _check(shape: Shape) -> None:
    bounds = {
        "nodes": (shape.nodes, 1, 100_000),
        "racks": (shape.racks, 1, shape.nodes),
        "spines": (shape.spines, 1, 1024),
        "gbps": (shape.gbps, 1e-6, 1e9),
        "noise": (shape.noise, 0, 1),
        "spread": (shape.spread, 0, 1),
        "glitch": (shape.glitch, 0, 1),
        "uplink_flows": (1 if shape.uplink_flows is None else shape.uplink_flows, 1, 100_000),
        **{f"fault {f.kind}:{f.name} loss": (f.loss, 0, 1) for f in shape.faults},
    }
    for name, (value, low, high) in bounds.items():
        if not low <= value <= high:
            raise UsageError(f"--sim {name}: {value:g} is not between {low:g} and {high:g}")
