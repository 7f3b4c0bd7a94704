"""Verdict from the best explanation: named parts, cleared parts, open questions, next action."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from trainmaster.bench.isolate.judge import Explanation, gains
from trainmaster.bench.isolate.likelihood import LEAST_LOSS, looks_slow
from trainmaster.bench.isolate.parts import Pair, Part, path
from trainmaster.bench.isolate.record import Record
from trainmaster.bench.isolate.result import ANY_SWITCH, EVIDENCE_KEPT, Diagnosis, Measurement, Suspect
from trainmaster.bench.isolate.view import Score
from trainmaster.core.results import Overall

_NAMED = 0.95  # confidence from which a part is named
_SURE = 0.99  # confidence from which no further round is run for it
_REPEATS = 2  # slow results a named part must have shown; the search goes on until there is one more
REPEATED_PAIRS = 3  # the same for pairs, where a part shows in some pairs only: congestion takes others each time
_CLEARED = math.log(0.01)  # a part is cleared when the results speak a hundred to one against its fault
_RIVAL = 0.05  # share of the posterior from which a rival is told
_SHARED = 3  # bad nodes from which, where racks are not known, something they share is likelier
_TOO_FAST = 0.01  # share of results above the baseline from which the baseline is in question
_UNSTEADY = 0.02  # share of slow results without an explanation from which the fabric itself is in question


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchState:
    """State of the search after a round."""

    open: tuple[Part, ...]  # neither named nor cleared, and more rounds may tell
    hidden: tuple[Part, ...]  # behind a named part: they can be judged once it is repaired
    cleared: int
    doubts: dict[Part, float]  # probability of being bad, of every part worth a test
    settled: bool


def assess_search(explanation: Explanation, known: Sequence[Part]) -> SearchState:
    """Weigh every known part against the best explanation."""
    named = {fault.part.identity for fault in explanation.faults}
    slow_paths = [path(pair) for pair in _still_slow(explanation)]
    parts = [part for part in dict.fromkeys([*known, *slow_paths]) if part.identity not in named]
    by_part = gains(explanation, parts)
    hidden = tuple(part for part, gain in by_part.items() if gain is None and _veiled(explanation, part))
    left = tuple(p for p, gain in by_part.items() if p not in hidden and (gain is None or gain > _CLEARED))
    doubts = {p: _chance(gain, p.prior) for p, gain in by_part.items() if p in set(left)}
    sure = len(explanation.too_fast()) <= _TOO_FAST * len(explanation.ys)
    for fault in explanation.faults:
        confidence = explanation.confidence(fault)
        sure &= confidence >= _SURE and sum(looks_slow(explanation.ys[i]) for i in fault.shows) > _REPEATS
        sure &= fault.part.scope != "some" or explanation.confirmed(fault) >= REPEATED_PAIRS
        for part, share in explanation.rivals[fault.part]:
            doubts[part] = max(doubts.get(part, 0.0), share)
    cleared = len({part.identity for part in known} - named - {part.identity for part in (*left, *hidden)})
    return SearchState(open=left, hidden=hidden, cleared=cleared, doubts=doubts, settled=sure and not left)


def _veiled(explanation: Explanation, part: Part) -> bool:
    """No further test can tell: every flow through it also crosses a bad part. Behind a bad node another partner
    tells, and behind a bad link a node shows inside its rack; behind a bad switch nothing does."""
    shown = {i for fault in explanation.faults for i in fault.shows}
    kinds = {fault.part.kind for fault in explanation.faults} - {"node"} - ({"link"} if part.kind == "node" else set())
    return bool(kinds) and bool(shown & set(explanation.record.cover.get(part, ())))


def _still_slow(explanation: Explanation) -> list[Pair]:
    """Pairs with a slow result that no fault accounts for, until as many repeats were not slow."""
    record = explanation.record
    odd = dict.fromkeys(record.pairs[i] for i in explanation.unexplained())
    return [p for p in odd if sum(1 if looks_slow(explanation.ys[i]) else -1 for i in record.by_pair[p]) > 0]


def suspect(explanation: Explanation, fault: Score, confidence: float | None = None) -> Suspect:
    """A fault with its confidence and the results that show it."""
    record, cover = explanation.record, explanation.record.cover[fault.part]
    slow = [i for i in fault.shows if looks_slow(explanation.ys[i])]
    return Suspect(
        kind=fault.part.kind,
        name=fault.part.name,
        confidence=explanation.confidence(fault) if confidence is None else confidence,
        loss=fault.state.loss,
        slow=len(slow),
        measured=len(cover),
        evidence=tuple(_measurement(record, explanation, i) for i in slow[:EVIDENCE_KEPT]),
    )


def diagnose(
    record: Record, explanation: Explanation | None, search: SearchState | None, expected: tuple[float, float] | None
) -> Diagnosis:
    """The verdict. Fails closed: too few measurements are never a pass."""
    if explanation is None or search is None:
        return Diagnosis(
            verdict=Overall.INCOMPLETE, suspects=(), candidates=(), cleared=0,
            not_cleared=tuple(f"node {node}" for node in record.topology.nodes),
            notes=("no test of any pair answered",),
            action="see that the test itself runs on two nodes, then run this again",
            rounds=max(record.rounds, default=0), measurements=len(record),
            pairs_tested=len(record.by_pair), pairs=math.comb(len(record.topology.nodes), 2),
            healthy_gbps=None, noise=None,
        )  # fmt: skip
    named, groups = _name(explanation)
    notes = _notes(record, explanation, search, expected)
    whole = not (groups or search.open or notes)
    verdict = Overall.FAIL if named else Overall.PASS if whole else Overall.INCOMPLETE
    candidates_named = {(candidate.kind, candidate.name) for group in groups for candidate in group}
    uncleared = dict.fromkeys(
        f"{part.kind} {part.name}" for part in (*search.open, *search.hidden) if part.identity not in candidates_named
    )
    return Diagnosis(
        verdict=verdict,
        suspects=named,
        candidates=groups,
        cleared=search.cleared,
        not_cleared=tuple(uncleared),
        notes=notes,
        action=_action(named, groups, notes, search),
        rounds=max(record.rounds),
        measurements=len(record),
        pairs_tested=len(record.by_pair),
        pairs=math.comb(len(record.topology.nodes), 2),
        healthy_gbps=math.exp(explanation.centres[0]),
        noise=explanation.sigma,
    )


def _name(explanation: Explanation) -> tuple[tuple[Suspect, ...], tuple[tuple[Suspect, ...], ...]]:
    named, groups = [], []
    for fault in explanation.faults:
        candidate = suspect(explanation, fault)
        repeated = fault.part.scope != "some" or explanation.confirmed(fault) >= _REPEATS
        if candidate.confidence >= _NAMED and candidate.slow >= _REPEATS and repeated and candidate.name != ANY_SWITCH:
            named.append(candidate)
        else:
            groups.append(_group(explanation, fault))
    if explanation.record.topology.racks is None and len(named) > _SHARED:
        # So many at once are rather behind one switch than each bad, and without racks that cannot be seen.
        return (), (tuple(named), *groups)
    return tuple(sorted(named, key=lambda s: (s.kind, s.name))), tuple(groups)


def _group(explanation: Explanation, fault: Score) -> tuple[Suspect, ...]:
    """The fault and every rival that explains the same results nearly as well."""
    shares: dict[tuple[str, str], float] = {}
    parts: dict[tuple[str, str], Part] = {}
    for part, share in explanation.rivals[fault.part]:
        shares[part.identity] = shares.get(part.identity, 0.0) + share
        parts.setdefault(part.identity, part)
    kept = [identity for identity, share in shares.items() if share >= _RIVAL] or [fault.part.identity]
    return tuple(
        suspect(explanation, Score(fault.gain, parts[identity], fault.state, fault.shows), shares[identity])
        for identity in sorted(kept, key=lambda identity: -shares[identity])
    )


def _notes(
    record: Record, explanation: Explanation, search: SearchState, expected: tuple[float, float] | None
) -> tuple[str, ...]:
    """Obstacles to a pass other than faults."""
    notes, (inside, between) = [], explanation.centres
    if len(record.topology.nodes) < 3 and expected is None:
        notes.append("two nodes have one pair and nothing to compare it with; state what is expected")
    answered = [(math.log(g), cross) for g, cross in zip(record.gbps, record.cross, strict=True) if g is not None]
    if expected is not None:
        reached = math.exp(inside) / expected[0]
        if reached < 1 - LEAST_LOSS:
            notes.append(
                f"even good pairs give {reached:.0%} of what is expected: no single part, a common cause; "
                "see which transport carried the traffic"
            )
    else:
        if len(record.topology.members) == 2:  # their baseline is common
            between = inside + median([y - inside for y, cross in answered if cross] or [0.0])
        if between - inside < math.log(1 - LEAST_LOSS):
            notes.append(
                f"pairs between racks give {math.exp(between - inside):.0%} of pairs inside them, for every rack: the "
                "fabric is built so, or what joins the racks is bad; state what is expected between racks"
            )
    fast = len(explanation.too_fast())
    if fast > _TOO_FAST * len(record):
        notes.append(f"{fast} results are faster than healthy pairs seem to be: the baseline is in question; state it")
    odd = len(explanation.unexplained())
    if odd > max(2, _UNSTEADY * len(record)):
        notes.append(f"{odd} of {len(record)} results are slow and no part explains them: congestion, or other jobs")
    if record.topology.racks is None and sum(fault.part.kind == "node" for fault in explanation.faults) > _SHARED:
        notes.append("many nodes are slow at once and racks are not known: they may share a switch; give the racks")
    if search.open:
        notes.append(f"{len(search.open)} parts were not measured enough to be cleared")
    return tuple(notes)


def _action(
    named: Sequence[Suspect], groups: Sequence[Sequence[Suspect]], notes: Sequence[str], search: SearchState
) -> str:
    """The one most useful action."""
    if named:
        worst = max(named, key=lambda s: (s.kind == "switch", s.confidence))
        again = ", then run this again" if len({s.kind for s in named}) > 1 or groups or search.hidden else ""
        match worst.kind:
            case "node":
                names = ", ".join(s.name for s in named if s.kind == "node")
                return f"take {names} out of service and look at adapter, bus and cable{again}"
            case "link":
                return f"reseat or replace {worst.words}{again}"
            case _:
                return f"look at {worst.words} (port errors, temperature, firmware){again}"
    if groups and groups[0][0].name == ANY_SWITCH:
        return "give the rack of each node, then run this again"
    if groups:
        return f"look at {groups[0][0].words} first, then run this again"
    if notes:
        return (
            notes[0].rpartition("; ")[2] if "; " in notes[0] else "run this again on an idle fabric, with more rounds"
        )
    return "nothing; the fabric is in order"


def _chance(gain: float | None, prior: float) -> float:
    odds = math.exp(min(gain or 0.0, 500.0)) * prior / (1 - prior)
    return odds / (1 + odds)


def _measurement(record: Record, explanation: Explanation, i: int) -> Measurement:
    a, b = record.pairs[i]
    healthy = math.exp(explanation.centres[record.cross[i]])
    return Measurement(round=record.rounds[i], a=a, b=b, gbps=record.gbps[i], healthy_gbps=healthy)
