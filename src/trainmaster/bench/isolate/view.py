"""Likelihood of every result under a fault set, and what one more bad part would change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainmaster.bench.isolate.likelihood import NoiseModel, State, bad, congested, healthy, log_sum, looks_slow, states
from trainmaster.bench.isolate.parts import Part
from trainmaster.bench.isolate.record import Record


@dataclass(frozen=True, slots=True)
class Score:
    """ln of the Bayes factor for adding a part to a fault set, its best state, and the results that then show it."""

    gain: float
    part: Part
    state: State
    shows: tuple[int, ...]

    @property
    def odds(self) -> float:
        """ln of the posterior odds."""
        return self.gain + math.log(self.part.prior / (1 - self.part.prior))


class View:
    """Likelihood of every result under a fault set, and what one more part would change."""

    def __init__(
        self,
        record: Record,
        ys: Sequence[float | None],
        sigma: float,
        faults: Iterable[Score],
        congestion: NoiseModel | None = None,
    ) -> None:
        self.record, self.ys, self.sigma = record, ys, sigma
        if congestion is None:
            self.now = [healthy(y, sigma) for y in ys]
        else:
            both = zip(ys, congestion.density, strict=True)
            self.now = [congested(y, sigma, congestion.share, density) for y, density in both]
        self.worst = [0.0] * len(ys)  # ln(speed) the set allows each result; -inf: none expected
        for fault in faults:
            self.apply(fault)

    def copy(self) -> View:
        twin = object.__new__(View)
        twin.record, twin.ys, twin.sigma = self.record, self.ys, self.sigma
        twin.now, twin.worst = list(self.now), list(self.worst)
        return twin

    def apply(self, score: Score) -> None:
        for i in score.shows:
            change = self._change(i, score.state)
            self.now[i] += change
            if change or self.worst[i] == 0.0:
                self.worst[i] = min(self.worst[i], _depth(score.state))

    def scores(self, parts: Iterable[Part]) -> list[Score]:
        return [self.score(part) for part in parts]

    def score(self, part: Part) -> Score:
        return self._score_some(part) if part.scope == "some" else self._score_all(part)

    def _score_all(self, part: Part) -> Score:
        indexes = self.record.cover[part]
        free = [i for i in indexes if self.worst[i] == 0.0]
        tried = [
            (weight + sum(self._change(i, state) for i in indexes), state)
            for state, weight in states([self.ys[i] for i in free], self.sigma)
        ]
        if not tried:
            return Score(-math.inf, part, State("dead"), ())
        _, state = max(tried, key=lambda option: option[0])
        return Score(log_sum([gain for gain, _ in tried]), part, state, tuple(indexes))

    def _score_some(self, part: Part) -> Score:
        """A bad part that only some pairs cross: which, is summed over pair by pair."""
        cover = self.record.cover[part]
        groups: dict[tuple[str, str], list[int]] = {}
        for i in cover:
            groups.setdefault(self.record.pairs[i], []).append(i)
        slow = [self.ys[i] for i in cover if self.worst[i] == 0.0 and looks_slow(self.ys[i])]
        shares = self.record.topology.shares(part)
        best = Score(-math.inf, part, State("dead"), ())
        for state, weight in states(slow, self.sigma) or [(State("slow", math.log(0.5)), 0.0)]:
            changes = {pair: sum(self._change(i, state) for i in indexes) for pair, indexes in groups.items()}
            ratios = [math.exp(min(change, 500.0)) for change in changes.values()]
            by_share = [sum(math.log(1 - q + q * ratio) for ratio in ratios) for q in shares]
            gain = weight + log_sum(by_share) - math.log(len(shares))
            if gain > best.gain:
                q = shares[max(range(len(shares)), key=by_share.__getitem__)]
                crossing = [pair for pair, change in changes.items() if change > math.log((1 - q) / q)]
                best = Score(gain, part, state, tuple(i for pair in crossing for i in groups[pair]))
        return best

    def _change(self, i: int, state: State) -> float:
        """ln of how much likelier a result becomes when its path also holds a part in that state."""
        if _depth(state) >= self.worst[i]:
            return 0.0  # its path is already as bad
        return bad(self.ys[i], state, self.sigma) - self.now[i]


def _depth(state: State) -> float:
    if state.mode == "dead":
        return -math.inf
    return state.level if state.mode == "slow" else -1e-9  # flaky: worse than healthy, better than anything slow
