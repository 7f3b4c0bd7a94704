"""Fault isolation: the bad node, link or switch, by adaptive rounds of concurrent pair tests.

Pure: the caller supplies `measure`, which runs a round; nothing here touches a machine or a clock.

    measure(pairs) ─▶ record ─▶ judge.explain ─▶ settled? ─ yes ─▶ Diagnosis
         ▲                                          │ no
         └────────────── rounds.plan ◀──────────────┘
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

from trainmaster.bench.isolate import rounds
from trainmaster.bench.isolate.diagnose import REPEATED_PAIRS, assess_search, diagnose, suspect
from trainmaster.bench.isolate.judge import Explanation, explain
from trainmaster.bench.isolate.parts import Pair, Part, Route, Topology, path
from trainmaster.bench.isolate.record import Record
from trainmaster.bench.isolate.result import Diagnosis, Measurement, RoundReport, Suspect
from trainmaster.core.errors import UsageError

__all__ = ["Diagnosis", "Measurement", "RoundReport", "Suspect", "isolate"]

Measure = Callable[[list[Pair]], Sequence[float | None]]

_LEAST_ROUNDS = 4  # at least two between racks, one inside them, one repeat: fewer judge nothing
_LEAST_RESULTS = 16  # nor is a baseline read from fewer
_FEW_NODES = 8
_DOUBT = 0.01  # probability of being bad from which a node is paired with care


def isolate(
    nodes: Sequence[str],
    racks: Mapping[str, str] | None,
    measure: Measure,
    *,
    seed: int,
    max_rounds: int = 12,
    expected_gbps: float | None = None,
    expected_cross_gbps: float | None = None,
    route: Route | None = None,
    progress: Callable[[RoundReport], None] = lambda _: None,
) -> Diagnosis:
    """Find the bad parts of a fabric.

    `racks` names the leaf switch of each node; None: not known, and switches cannot be told from nodes. `measure` runs
    one round of tests, each node in one pair at most, and gives GB/s or None for no answer. `expected_gbps` is what a
    healthy pair gives, `expected_cross_gbps` what one between racks gives where that differs; not stated: read from
    the results, as most pairs are healthy. `route` names the links and spine between two nodes of different racks.
    """
    _check(nodes, racks, max_rounds, expected_gbps, expected_cross_gbps)
    topology = Topology(nodes, racks, route)
    rng = random.Random(f"isolate {seed}")  # noqa: S311 (repeatable pairings, no secret)
    known = topology.known(rng)
    expected = (expected_gbps, expected_cross_gbps or expected_gbps) if expected_gbps is not None else None
    record, explanation, search = Record(topology), None, None
    for number in range(1, max_rounds + 1):
        doubts: Mapping[Part, float] = search.doubts if search is not None else {}
        suspects, repeats = _in_doubt(record, explanation, doubts, rng)
        pairs, purpose = rounds.plan(number, record, doubts, suspects=suspects, repeats=repeats, rng=rng)
        results = measure(pairs)
        if len(results) != len(pairs):
            raise ValueError(f"measure gave {len(results)} results for {len(pairs)} pairs")
        for pair, gbps in zip(pairs, results, strict=True):
            record.add(number, pair, gbps)
        explanation = explain(record, expected)
        search = assess_search(explanation, known) if explanation is not None else None
        progress(_report(number, purpose, len(pairs), explanation))
        if search is not None and search.settled and number >= _LEAST_ROUNDS and len(record) >= _LEAST_RESULTS:
            break
    return diagnose(record, explanation, search, expected)


def _in_doubt(
    record: Record, explanation: Explanation | None, doubts: Mapping[Part, float], rng: random.Random
) -> tuple[list[str], list[Pair]]:
    """Doubtful nodes, most doubtful first; and slow pairs to repeat whose ends are both trusted."""
    # Among few nodes a suspect would take part in every test and leave no healthy pair to compare it with.
    if explanation is None or (len(record.topology.nodes) < _FEW_NODES and record.rounds[-1] % 2 == 0):
        return [], []
    weight = {part.name: doubt for part, doubt in doubts.items() if part.kind == "node" and doubt > _DOUBT}
    odd = dict.fromkeys(record.pairs[i] for i in explanation.unexplained())
    repeats = [pair for pair in odd if path(pair) in doubts and not set(pair) & set(weight)]
    for fault in explanation.faults:
        if fault.part.scope == "some" and explanation.confirmed(fault) < REPEATED_PAIRS:
            repeats += dict.fromkeys(record.pairs[i] for i in fault.shows)
    # Half of them at random: repeated all together, flows that were in each other's way would be so again.
    repeats = rng.sample(repeats, (len(repeats) + 1) // 2)
    # More than a quarter in doubt is no suspicion: random pairs then tell as much and keep the racks mixed.
    most = max(len(record.topology.nodes) // 4, 1)
    return sorted(weight, key=lambda node: -weight[node])[:most], repeats[:most]


def _report(number: int, purpose: str, pairs: int, explanation: Explanation | None) -> RoundReport:
    if explanation is None:
        return RoundReport(number=number, purpose=purpose, pairs=pairs, slow=pairs, leading=())
    return RoundReport(
        number=number,
        purpose=purpose,
        pairs=pairs,
        slow=sum(explanation.stands_out(i) for i in range(len(explanation.ys) - pairs, len(explanation.ys))),
        leading=tuple(suspect(explanation, fault) for fault in explanation.faults),
    )


def _check(
    nodes: Sequence[str],
    racks: Mapping[str, str] | None,
    max_rounds: int,
    expected_gbps: float | None,
    expected_cross_gbps: float | None,
) -> None:
    if len(nodes) < 2:
        raise UsageError(f"isolate: {len(nodes)} nodes; it takes two at the least to test a pair")
    if len(set(nodes)) < len(nodes):
        twice = next(node for node in nodes if list(nodes).count(node) > 1)
        raise UsageError(f"isolate: node {twice} is listed twice; keep one")
    if racks is not None and (missing := [node for node in nodes if node not in racks]):
        raise UsageError(f"isolate: no rack is given for {', '.join(missing[:5])}; give all racks or none")
    if max_rounds < 1:
        raise UsageError(f"isolate: {max_rounds} rounds; at least 1")
    for value in (expected_gbps, expected_cross_gbps):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"isolate: {value} GB/s cannot be expected; give a number above 0")
    if expected_cross_gbps is not None and expected_gbps is None:
        raise UsageError("isolate: expected_cross_gbps without expected_gbps; give both")
