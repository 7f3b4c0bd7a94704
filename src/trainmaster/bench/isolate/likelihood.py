"""Likelihood of one result: on a healthy path, through a slow, dead or flaky part.

A result is y = ln(measured / healthy), or None for no answer. Every mode keeps a small, wide share for one-off
disturbances, so that a single slow result never convicts a part.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

Mode = Literal["slow", "dead", "flaky"]

LEAST_LOSS = 0.15  # a part that loses less is not called bad
LEAST_DROP = math.log(1 - LEAST_LOSS)
_DEEPEST = -4.0  # 2% of the speed; less counts as no answer in practice
_WIDE = 1 / 4.0  # density of a disturbance: uniform over ln(speed) from -4 to 0 …
_FASTER = 1e-4  # … and hardly ever above: nothing makes a pair faster than it can be
_GLITCH = 2e-3  # share of disturbed results on a healthy path
_LOST = 1e-3  # share of healthy tests without an answer
_GLITCH_SLOW, _LOST_SLOW = 0.02, 0.05  # a bad part is less steady than a good one …
_WIDER = 2.0  # … and scatters so many times as much
_ANSWER_DEAD = 0.03
_ROOT = math.sqrt(2 * math.pi)


@dataclass(frozen=True, slots=True)
class State:
    """How a part is bad; `level` is ln(speed) where it is slow."""

    mode: Mode
    level: float = 0.0

    @property
    def loss(self) -> float | None:
        return 1 - math.exp(self.level) if self.mode == "slow" else None


@dataclass(frozen=True, slots=True)
class NoiseModel:
    """Congestion: the share of results it slows, and the density with which it gives each one."""

    share: float
    density: tuple[float, ...]


def healthy(y: float | None, sigma: float) -> float:
    """ln of the likelihood on a healthy path."""
    if y is None:
        return math.log(_LOST)
    return math.log((1 - _GLITCH - _LOST) * _normal(y / sigma) / sigma + _GLITCH * _wide(y))


def congested(y: float | None, sigma: float, share: float, density: float) -> float:
    """ln of the likelihood on a healthy path through congestion."""
    return math.log((1 - share) * math.exp(healthy(y, sigma)) + share * density)


def fit_noise(ys: Sequence[float | None], sigma: float) -> NoiseModel:
    """Congestion as the sole cause of all slow results: their share and their speeds.

    A bad part must explain more than that: that it is these pairs, and these again.
    """
    slow, width = [y for y in ys if looks_slow(y)], 2 * _WIDER * sigma
    bins = Counter(None if y is None else round(y / width) for y in slow)

    def density(y: float | None) -> float:
        if not looks_slow(y):
            return 0.0
        return bins[None] / len(slow) if y is None else bins[round(y / width)] / len(slow) / width

    return NoiseModel(min(len(slow) / len(ys), 0.99), tuple(density(y) for y in ys))


def bad(y: float | None, state: State, sigma: float) -> float:
    """ln of the likelihood through one part in that state."""
    if state.mode == "dead":
        return math.log(1 - _ANSWER_DEAD) if y is None else math.log(_ANSWER_DEAD * _wide(y))
    if state.mode == "flaky":
        return math.log(0.5) + (0.0 if y is None else healthy(y, sigma))
    if y is None:
        return math.log(_LOST_SLOW)
    wide = _WIDER * sigma
    return math.log(
        (1 - _GLITCH_SLOW - _LOST_SLOW) * _normal((y - state.level) / wide) / wide + _GLITCH_SLOW * _wide(y)
    )


def states(ys: Sequence[float | None], sigma: float) -> list[tuple[State, float]]:
    """The states worth trying for a part with these results, each with ln of its prior weight.

    The level of a slow part is fitted, and the fit is paid for: the weight is the width of the posterior over the
    width of the prior (Laplace's approximation), so that a free level never wins by being free.
    """
    answered = [y for y in ys if y is not None]
    candidates: list[tuple[State, float]] = []
    if answered:
        level = min(max(median(answered), _DEEPEST), LEAST_DROP)
        width = _ROOT * _WIDER * sigma / math.sqrt(len(answered))
        weight = min(width / (LEAST_DROP - _DEEPEST), 1.0)
        candidates.append((State("slow", level), math.log(weight / 2)))
    if len(answered) < len(ys):
        candidates.append((State("dead"), math.log(1 / 3)))
        candidates.append((State("flaky"), math.log(1 / 6)))
    return candidates


def looks_slow(y: float | None) -> bool:
    """Whether a result is slow enough to look into: a filter, not a verdict."""
    return y is None or y < LEAST_DROP


def log_sum(values: Sequence[float]) -> float:
    """log-sum-exp."""
    top = max(values)
    return top + math.log(sum(math.exp(value - top) for value in values)) if top > -math.inf else top


def _normal(z: float) -> float:
    return math.exp(-0.5 * z * z) / _ROOT


def _wide(y: float) -> float:
    return _WIDE if y <= 0 else _FASTER
