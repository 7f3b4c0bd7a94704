"""Who is tested with whom next: disjoint pairs, chosen so that the answers tell the open explanations apart.

The first round goes between racks, the second inside them. After that, nodes in doubt are paired first, each with
the partner whose result is hardest to foresee (p(1-p) of being slow), which is mostly a cleared node. A slow pair
whose ends are both trusted is repeated: only its path is left in doubt. All others are paired at random between
racks, which is where links and switches show, every fourth round inside them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from trainmaster.bench.isolate.parts import Pair, Part
from trainmaster.bench.isolate.record import Record

_PARTNERS = 8  # cleared partners looked at on either side of the rack's border
_TRIES = 6  # partners tried before an earlier pair is repeated


def plan(
    number: int,
    record: Record,
    doubts: Mapping[Part, float],
    *,
    suspects: Sequence[str],
    repeats: Sequence[Pair],
    rng: random.Random,
) -> tuple[list[Pair], str]:
    """The pairs of round `number`, and its purpose in words. `doubts`: probability of being bad, of parts in doubt."""
    free = set(record.topology.nodes)
    pairs = _swap(record, doubts, suspects, free, rng)
    for pair in repeats:
        if free >= set(pair):
            free -= set(pair)
            pairs.append(pair)
    inside = not record.topology.many_racks or number % 4 == 2
    rest = _match(record, free, inside=inside, rng=rng)
    if not record.topology.many_racks:
        purpose = "pairs at random"
    else:
        purpose = "pairs inside racks" if inside else "pairs between racks"
    if pairs:
        purpose = f"{len(pairs)} pairs to settle doubts, then {purpose}" if rest else f"{len(pairs)} pairs to settle"
    return pairs + rest, purpose


def _swap(
    record: Record, doubts: Mapping[Part, float], suspects: Sequence[str], free: set[str], rng: random.Random
) -> list[Pair]:
    """Each suspect with the partner that tells most."""
    in_doubt, pairs = set(suspects), []
    trusted = [node for node in record.topology.nodes if node not in in_doubt]
    for node in suspects:
        if node not in free:
            continue
        options = [other for other in _options(record, node, trusted, rng) if other in free and other != node]
        if not options:
            continue
        values = {other: _worth(record, doubts, (node, other)) for other in options}
        # Among equals, someone new: a repeat teaches nothing about anybody else.
        best = max(options, key=lambda other: (round(values[other], 3), -len(_earlier(record, node, other))))
        free -= {node, best}
        pairs.append((node, best))
    return pairs


def _options(record: Record, node: str, trusted: Sequence[str], rng: random.Random) -> list[str]:
    racks, few = record.topology.racks, min(2 * _PARTNERS, len(trusted))
    options = rng.sample(list(trusted), few)
    if racks is not None:
        near = [other for other in record.topology.members[racks[node]] if other != node]
        options += rng.sample(near, min(_PARTNERS, len(near)))
    met = [a if b == node else b for a, b in record.by_pair if node in (a, b)]
    return list(dict.fromkeys(options + met))


def _worth(record: Record, doubts: Mapping[Part, float], pair: Pair) -> float:
    """Variance of "will it be slow?" under the open explanations."""
    slow = min(sum(doubts.get(part, 0.0) * _share(record, part) for part in record.topology.parts(pair)), 1.0)
    return slow * (1 - slow)


def _share(record: Record, part: Part) -> float:
    return record.topology.shares(part)[0] / 2 if part.scope == "some" else 1.0


def _match(record: Record, free: set[str], *, inside: bool, rng: random.Random) -> list[Pair]:
    """The rest at random, inside racks or between them; who stays over is paired with whoever is left."""
    members = {rack: [n for n in nodes if n in free] for rack, nodes in record.topology.members.items()}
    for nodes in members.values():
        rng.shuffle(nodes)
        # Where someone must sit out, it is one who has been tested most.
        nodes.sort(key=lambda node: record.tested[node], reverse=True)
    pairs: list[Pair] = []
    if inside:
        for nodes in members.values():
            while len(nodes) > 1:
                node = nodes.pop()
                pairs.append((node, nodes.pop(_choose(record, node, nodes, rng))))
    while True:
        racks = [rack for rack, nodes in members.items() if nodes]
        if len(racks) < 2:
            break
        # From the fullest rack, so that no rack is left over with itself.
        fullest = max(racks, key=lambda rack: (len(members[rack]), rng.random()))
        others = [rack for rack in racks if rack != fullest]
        node = members[fullest].pop()
        rack = rng.choices(others, [len(members[other]) for other in others])[0]
        pairs.append((node, members[rack].pop(_choose(record, node, members[rack], rng))))
    left = next((nodes for nodes in members.values() if nodes), [])
    while len(left) > 1:
        node = left.pop()
        pairs.append((node, left.pop(_choose(record, node, left, rng))))
    return pairs


def _choose(record: Record, node: str, others: Sequence[str], rng: random.Random) -> int:
    """Someone this node has met least."""
    picks = [rng.randrange(len(others)) for _ in range(_TRIES)]
    return min(picks, key=lambda pick: len(_earlier(record, node, others[pick])))


def _earlier(record: Record, a: str, b: str) -> list[int]:
    return record.by_pair.get((a, b) if a < b else (b, a), [])
