"""The set of bad parts that best explains the results, and its confidence.

A fault set predicts every result: a pair runs at the speed of its worst part. The set is grown greedily by posterior
odds, then revised: each member is taken out and every rival put in its place. A member's confidence is its share of
the posterior among: itself, no fault at all, each single rival, and the best groups of rivals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from trainmaster.bench.isolate import baseline
from trainmaster.bench.isolate.likelihood import LEAST_DROP, NoiseModel, fit_noise, log_sum, looks_slow
from trainmaster.bench.isolate.parts import Part
from trainmaster.bench.isolate.record import Record
from trainmaster.bench.isolate.view import Score, View

_MOST_FAULTS = 24  # more than this is no fault but a state of the fabric
_PASSES = 3
_ROUGH = 0.01  # share of slow results from which congestion is tried as an explanation …
_CONGESTION_PRIOR = 0.01  # … and how often it is one, before anything is measured: an assumption
_RIVALS_GROWN, _GROWN_TO = 3, 4  # rivals that are also tried together with further ones, and up to how many


@dataclass(slots=True)
class Explanation:
    """A fault set with its consequences."""

    record: Record
    ys: list[float | None]  # ln(measured / healthy)
    centres: tuple[float, float]  # ln of healthy GB/s inside a rack and between racks
    sigma: float
    congestion: NoiseModel | None = None  # where that is part of it
    faults: list[Score] = field(default_factory=list)
    rivals: dict[Part, list[tuple[Part, float]]] = field(default_factory=dict)  # shares of the posterior, by fault
    total: float = 0.0  # ln of the posterior, up to a constant
    agreement: dict[tuple[str, str], float] = field(default_factory=dict)  # see _agreement

    def view(self) -> View:
        return View(self.record, self.ys, self.sigma, self.faults, self.congestion)

    def unexplained(self) -> list[int]:
        """Results that neither noise nor a fault of the set explains."""
        shown = {i for fault in self.faults for i in fault.shows}
        return [i for i in range(len(self.ys)) if i not in shown and self.stands_out(i)]

    def stands_out(self, i: int) -> bool:
        """Unanswered, or slower than the noise of healthy pairs gives once in thirty thousand."""
        y = self.ys[i]
        return y is None or y < min(LEAST_DROP, -4 * self.sigma)

    def too_fast(self) -> list[int]:
        """Results above the baseline. Nothing makes a pair faster than it can be, so the baseline is wrong."""
        limit = max(-LEAST_DROP, 4 * self.sigma)
        return [i for i, y in enumerate(self.ys) if y is not None and y > limit]

    def confirmed(self, fault: Score) -> int:
        """Pairs through a part that were slow, tested again, and slow again."""
        groups = {self.record.pairs[i]: self.record.by_pair[self.record.pairs[i]] for i in fault.shows}
        return sum(len(g) > 1 and all(looks_slow(self.ys[i]) for i in g) for g in groups.values())

    def confidence(self, fault: Score) -> float:
        share = sum(share for part, share in self.rivals[fault.part] if part.identity == fault.part.identity)
        return share * self.agreement.get(fault.part.identity, 1.0)


def explain(record: Record, expected: tuple[float, float] | None) -> Explanation | None:
    """The best explanation of all results; None where nothing answered. `expected`: GB/s in and between racks."""
    explanations = [
        _refine(record, centres, sigma, fixed=expected is not None) for centres, sigma in _starts(record, expected)
    ]
    explanations += [_rough(calm) for calm in explanations if _many_slow(calm)]
    if not explanations:
        return None
    best = max(explanations, key=lambda explanation: explanation.total)
    _weigh_rivals(best)
    best.agreement = _agreement(explanations)
    return best


def gains(explanation: Explanation, parts: Iterable[Part]) -> dict[Part, float | None]:
    """ln of the Bayes factor for each part being bad as well; None where nothing tells: untested, or hidden behind
    the known faults."""
    view, cover = explanation.view(), explanation.record.cover
    by_part: dict[Part, float | None] = {}
    for part in parts:
        indexes = cover.get(part, [])
        free = sum(view.worst[i] == 0.0 for i in indexes)
        hidden = free == 0 or (free < 2 and free < len(indexes))
        # Results too few for their noise cannot show the least loss at three sigma: they speak for nobody.
        weak = math.sqrt(free) * -LEAST_DROP < 3 * explanation.sigma
        by_part[part] = None if hidden or weak else view.score(part).gain
    return by_part


def _agreement(explanations: Sequence[Explanation]) -> dict[tuple[str, str], float]:
    """How far explanations from different baselines agree on a part: the posterior share of those that call it bad."""
    whole = log_sum([explanation.total for explanation in explanations])
    shares: dict[tuple[str, str], float] = {}
    for explanation in explanations:
        for identity in {fault.part.identity for fault in explanation.faults}:
            shares[identity] = shares.get(identity, 0.0) + math.exp(explanation.total - whole)
    return shares


def _starts(record: Record, expected: tuple[float, float] | None) -> list[tuple[tuple[float, float], float]]:
    logs = [(math.log(g), cross) for g, cross in zip(record.gbps, record.cross, strict=True) if g is not None]
    if not logs:
        return []
    if expected is not None:
        centres = (math.log(expected[0]), math.log(expected[1]))
        crowd, sigma = max(baseline.crowds([y - centres[cross] for y, cross in logs]))
        # Where even the fastest pairs fall short the cause is common: parts are then compared with their peers.
        shift = crowd if crowd < LEAST_DROP else 0.0
        return [((centres[0] + shift, centres[1] + shift), sigma)]
    inner, outer = [y for y, cross in logs if not cross], [y for y, cross in logs if cross]
    # With two racks one bad leaf slows every pair between them: only a common baseline can show it.
    if len(record.topology.members) < 3 or not inner or not outer:
        return [((centre, centre), sigma) for centre, sigma in baseline.crowds([y for y, _ in logs])]
    inside, between = baseline.crowds(inner), baseline.crowds(outer)
    return [((a, b), max(s, t)) for a, s in inside for b, t in between]


def _refine(record: Record, centres: tuple[float, float], sigma: float, *, fixed: bool) -> Explanation:
    """Explain, take baseline and noise anew from the results called healthy, explain again."""
    explanation = _fit(record, centres, sigma)
    for _ in range(2):
        shown = {i for fault in explanation.faults for i in fault.shows}
        calm = [i for i, y in enumerate(explanation.ys) if y is not None and i not in shown and abs(y) < 5 * sigma]
        if len(calm) < 2:
            break
        before = (*centres, sigma)
        if not fixed:
            centres = _recentre(record, explanation, calm)
        sigma = baseline.spread([math.log(record.gbps[i] or 1) - centres[record.cross[i]] for i in calm])
        if all(abs(old - new) < 0.1 * sigma for old, new in zip(before, (*centres, sigma), strict=True)):
            break  # it would explain the same again
        explanation = _fit(record, centres, sigma)
    return explanation


def _recentre(record: Record, explanation: Explanation, calm: Sequence[int]) -> tuple[float, float]:
    def centre(indexes: Sequence[int], old: float) -> float:
        return median(math.log(record.gbps[i] or 1) for i in indexes) if indexes else old

    if len(record.topology.members) < 3:
        common = centre(calm, explanation.centres[0])
        return common, common
    inner, outer = [i for i in calm if not record.cross[i]], [i for i in calm if record.cross[i]]
    inside, between = centre(inner, explanation.centres[0]), centre(outer, explanation.centres[1])
    return (inside if inner else between), (between if outer else inside)


def _fit(record: Record, centres: tuple[float, float], sigma: float) -> Explanation:
    ys = [
        None if g is None else math.log(g) - centres[cross] for g, cross in zip(record.gbps, record.cross, strict=True)
    ]
    explanation = Explanation(record=record, ys=ys, centres=centres, sigma=sigma)
    _search(explanation)
    return explanation


def _many_slow(explanation: Explanation) -> bool:
    slow = sum(explanation.stands_out(i) for i in range(len(explanation.ys)))
    return slow > max(2, _ROUGH * len(explanation.ys))


def _rough(calm: Explanation) -> Explanation:
    """The same results with congestion for a rival: it slows as many results, but neither the same pairs again nor
    all of one part."""
    congestion = fit_noise(calm.ys, calm.sigma)
    explanation = Explanation(
        record=calm.record, ys=calm.ys, centres=calm.centres, sigma=calm.sigma, congestion=congestion
    )
    _search(explanation)
    explanation.total += math.log(_CONGESTION_PRIOR)
    return explanation


def _search(explanation: Explanation) -> None:
    for _ in range(_PASSES):
        before = [fault.part for fault in explanation.faults]
        _grow(explanation)
        _revise(explanation)
        if [fault.part for fault in explanation.faults] == before:
            break
    view = View(explanation.record, explanation.ys, explanation.sigma, (), explanation.congestion)
    explanation.total = sum(view.now)
    for fault in explanation.faults:
        score = view.score(fault.part)
        explanation.total += score.odds
        view.apply(score)


def _grow(explanation: Explanation) -> None:
    view = explanation.view()
    while len(explanation.faults) < _MOST_FAULTS:
        left = [i for i, y in enumerate(explanation.ys) if view.worst[i] == 0.0 and looks_slow(y)]
        best = max(view.scores(_touched(explanation, left)), key=_odds, default=None)
        if best is None or best.odds <= 0:
            return
        explanation.faults.append(best)
        view.apply(best)


def _revise(explanation: Explanation) -> None:
    """Put the best explanation of the same results in each fault's place: one part, several, or none."""
    for fault in list(explanation.faults):
        explanation.faults.remove(fault)
        best = max(_alternatives(explanation, fault), key=_joint_odds, default=())
        if _joint_odds(best) > 0:
            explanation.faults.extend(best)


def _weigh_rivals(explanation: Explanation) -> None:
    """For each fault: the share of the posterior of every part that may stand in its place."""
    for at, fault in enumerate(list(explanation.faults)):
        explanation.faults.pop(at)
        alternatives = _alternatives(explanation, fault)
        explanation.faults.insert(at, fault)
        odds = [_joint_odds(scores) for scores in alternatives]
        whole = log_sum([0.0, *odds])  # 0: no fault at all
        shares: dict[Part, float] = {}
        for scores, share in zip(alternatives, odds, strict=True):
            for score in scores:
                shares[score.part] = shares.get(score.part, 0.0) + math.exp(share - whole)
        explanation.rivals[fault.part] = list(shares.items())


def _alternatives(explanation: Explanation, fault: Score) -> list[tuple[Score, ...]]:
    """Other explanations of the results that show a fault just taken out of the set: every single part, itself
    among them, and the likeliest others together with what they leave unexplained."""
    view = explanation.view()
    singles = sorted(view.scores(_touched(explanation, fault.shows)), key=_odds, reverse=True)
    by_parts: dict[frozenset[Part], tuple[Score, ...]] = {frozenset({score.part}): (score,) for score in singles}
    # A node is the smallest part: what it explains, several others together explain worse.
    others = [s for s in singles if s.part.identity != fault.part.identity] if fault.part.kind != "node" else []
    for first in others[:_RIVALS_GROWN]:
        grown, joint = view.copy(), [first]
        grown.apply(first)
        while len(joint) < _GROWN_TO:
            left = [i for i in fault.shows if grown.worst[i] == 0.0]
            taken = {score.part.identity for score in joint} | {fault.part.identity}
            parts = [part for part in _touched(explanation, left) if part.identity not in taken]
            best = max(grown.scores(parts), key=_odds, default=None)
            if best is None or best.odds <= 0:
                break
            joint.append(best)
            grown.apply(best)
        by_parts.setdefault(frozenset(score.part for score in joint), tuple(joint))
    return list(by_parts.values())


def _joint_odds(scores: Sequence[Score]) -> float:
    return sum(score.odds for score in scores)


def _touched(explanation: Explanation, indexes: Iterable[int]) -> list[Part]:
    """Parts these results went through, less those already called bad. One result never outweighs the prior of a
    single pair's path, so that paths are looked at from two on."""
    taken, cover = {fault.part.identity for fault in explanation.faults}, explanation.record.cover
    parts = dict.fromkeys(part for i in indexes for part in explanation.record.parts[i])
    return [part for part in parts if part.identity not in taken and not (part.is_path and len(cover[part]) < 2)]


def _odds(score: Score) -> float:
    return score.odds
