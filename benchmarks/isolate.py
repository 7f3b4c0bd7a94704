"""How often `isolate` names exactly the bad parts, on simulated fabrics: one line per case, misses included.

    python benchmarks/isolate.py                      the four cases that must hold, and a healthy fabric
    python benchmarks/isolate.py --all --trials 20    every case, also those where it is known to fall short
    python benchmarks/isolate.py --only "10% noise"

Each trial draws the bad parts, the noise and the pairings from its seed. exact: named what is bad and nothing else.
wrong: named something that is not bad. missed: said PASS over a fault. told: not named, but among the
candidates it gives. open: INCOMPLETE, or not all that is bad was named.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace

from trainmaster.bench.isolate import Diagnosis, isolate
from trainmaster.bench.isolate.result import ANY_SPINE, ANY_UPLINK
from trainmaster.core.results import Overall
from trainmaster.sim.fabric import Fabric, Fault, Shape

KIND = {"node": "node", "link": "link", "leaf": "switch", "leaf-all": "switch", "spine": "switch", "pair": "link"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of fabric: its shape, the kinds of its faults with their loss, and what the caller knows of it."""

    name: str
    faults: tuple[tuple[str, float], ...] = ()
    shape: Shape = field(default_factory=Shape)
    routes: bool = False
    racks: bool = True
    trials: int | None = None


def cases() -> list[Case]:
    """The ones that must hold."""
    return [
        Case(name="healthy", trials=200),
        Case(name="one bad node", faults=(("node", 0.5),)),
        Case(name="one bad link, routes known", faults=(("link", 0.5),), routes=True),
        Case(name="one bad link, routes not known", faults=(("link", 0.5),)),
        Case(name="one bad leaf (uplink side)", faults=(("leaf", 0.5),)),
        Case(name="one bad leaf (all of it)", faults=(("leaf-all", 0.5),)),
        Case(name="two bad nodes", faults=(("node", 0.5), ("node", 0.5))),
    ]


def more() -> list[Case]:
    """Milder and harder faults, other sizes, worse noise, less knowledge."""
    base, found = Shape(), []
    for loss in (0.2, 0.3, 0.9):
        for kind in ("node", "link", "leaf"):
            found.append(Case(name=f"{kind}, {loss:.0%} loss", faults=((kind, loss),)))
    for nodes, racks, spines in ((8, 2, 2), (8, 4, 2), (32, 4, 4), (33, 4, 4), (64, 8, 4), (255, 16, 8)):
        sized = replace(base, nodes=nodes, racks=racks, spines=spines)
        found.append(Case(name=f"{nodes} nodes in {racks} racks, healthy", shape=sized))
        for kind in ("node", "link", "leaf"):
            found.append(Case(name=f"{nodes} nodes in {racks} racks, {kind}", faults=((kind, 0.5),), shape=sized))
        found.append(Case(name=f"{nodes} in {racks}, link, routes", faults=(("link", 0.5),), shape=sized, routes=True))
    big = replace(base, nodes=1024, racks=32, spines=16)
    found += [Case(name=f"1024 nodes, {kind}", faults=((kind, 0.5),), shape=big, trials=5) for kind in ("node", "link")]
    for nodes in (3, 4, 5, 16):
        one = replace(base, nodes=nodes, racks=1)
        found.append(Case(name=f"{nodes} nodes in one rack, node", faults=(("node", 0.5),), shape=one))
    for noise in (0.1, 0.15):
        noisy = replace(base, noise=noise)
        found.append(Case(name=f"{noise:.0%} noise, healthy", shape=noisy))
        found += [
            Case(name=f"{noise:.0%} noise, {kind} {loss:.0%}", faults=((kind, loss),), shape=noisy)
            for kind in ("node", "link", "leaf")
            for loss in (0.3, 0.5)
        ]
    return [
        *found,
        Case(name="dead node", faults=(("node", 1.0),)),
        Case(name="dead leaf", faults=(("leaf-all", 1.0),)),
        Case(name="dead link", faults=(("link", 1.0),)),
        Case(name="spine, routes known", faults=(("spine", 0.5),), routes=True),
        Case(name="spine, routes not known", faults=(("spine", 0.5),)),
        Case(name="node and link", faults=(("node", 0.5), ("link", 0.5))),
        Case(name="node and leaf", faults=(("node", 0.5), ("leaf", 0.5))),
        Case(name="two links", faults=(("link", 0.5), ("link", 0.5))),
        Case(name="eight nodes", faults=(("node", 0.5),) * 8),
        Case(name="path of one pair", faults=(("pair", 0.5),)),
        Case(name="racks not known, node", faults=(("node", 0.5),), racks=False),
        Case(name="racks not known, leaf", faults=(("leaf-all", 0.5),), racks=False),
        Case(name="racks not known, healthy", racks=False),
        Case(name="0.5% glitches, healthy", shape=replace(base, glitch=0.005)),
        Case(name="0.5% glitches, node", faults=(("node", 0.5),), shape=replace(base, glitch=0.005)),
        Case(name="nodes differ by 3%, healthy", shape=replace(base, spread=0.03)),
        Case(name="nodes differ by 3%, node", faults=(("node", 0.5),), shape=replace(base, spread=0.03)),
        Case(name="uplinks collide, healthy", shape=replace(base, uplink_flows=2)),
        Case(name="uplinks collide, node", faults=(("node", 0.9),), shape=replace(base, uplink_flows=2)),
    ]


def trial(case: Case, seed: int) -> tuple[str, Diagnosis]:
    """One seeded trial: how it came out, and what was said."""
    fabric = Fabric(draw(case, seed))
    truth = {(KIND[fault.kind], fault.name) for fault in fabric.shape.faults}
    if not case.routes:
        truth = {_as_told(kind, name) for kind, name in truth}
    said = isolate(
        fabric.nodes,
        fabric.racks if case.racks else None,
        fabric.measure,
        seed=seed,
        route=fabric.route if case.routes else None,
    )
    named = {(suspect.kind, suspect.name) for suspect in said.suspects}
    maybe = {(suspect.kind, suspect.name) for group in said.candidates for suspect in group}
    if named - truth:
        return "wrong", said
    if named == truth and (truth or said.verdict is Overall.PASS):
        return "exact", said
    if truth and said.verdict is Overall.PASS:
        return "missed", said
    return ("told" if truth and truth <= named | maybe else "open"), said


def draw(case: Case, seed: int) -> Shape:
    """The fabric of a trial: different parts are bad each time."""
    rng = random.Random(f"trial {case.name} {seed}")
    plain = Fabric(case.shape)
    faults: list[Fault] = []
    while len(faults) < len(case.faults):
        kind, loss = case.faults[len(faults)]
        leaf, spine = rng.choice(sorted(set(plain.racks.values()))), f"spine{rng.randrange(case.shape.spines)}"
        name = {
            "node": rng.choice(plain.nodes),
            "link": f"{leaf}-{spine}",
            "spine": spine,
            "pair": "-".join(rng.sample(plain.nodes, 2)),
        }.get(kind, leaf)
        fault = Fault(kind=kind, name=name, loss=loss)  # type: ignore[arg-type]
        if fault not in faults:
            faults.append(fault)
    return replace(case.shape, seed=seed, faults=tuple(faults))


def _as_told(kind: str, name: str) -> tuple[str, str]:
    """What can be said of a part where routes are not known."""
    if kind == "link" and "spine" in name:
        return kind, name.partition("-")[0] + ANY_UPLINK
    if kind == "link":
        return kind, " – ".join(sorted(name.split("-")))
    return (kind, ANY_SPINE) if name.startswith("spine") else (kind, name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=0, help="other trials than those it was written against")
    parser.add_argument("--all", action="store_true", help="every case")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    chosen = parser.parse_args()
    wanted = [c for c in (cases() + more() if chosen.all or chosen.only else cases()) if chosen.only in c.name]
    outcomes = ("exact", "told", "open", "wrong", "missed")
    print(f"{'case':<38} {'trials':>6} " + " ".join(f"{word:>6}" for word in outcomes) + f" {'rounds':>12} {'s':>6}")
    for case in wanted:
        trials = min(chosen.trials, case.trials) if chosen.all and case.trials else case.trials or chosen.trials
        began, ends, rounds, missed = time.monotonic(), Counter[str](), [], []
        for seed in range(chosen.first_seed, chosen.first_seed + trials):
            end, said = trial(case, seed)
            ends[end] += 1
            rounds.append(said.rounds)
            missed += [seed] if end != "exact" else []
        spent = (time.monotonic() - began) / trials
        told = f"{sum(rounds) / trials:.1f}, max {max(rounds)}"
        counts = " ".join(f"{ends[word]:>6}" for word in outcomes)
        print(f"{case.name:<38} {trials:>6} {counts} {told:>12} {spent:>6.2f}", f"seeds {missed[:5]}" if missed else "")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
