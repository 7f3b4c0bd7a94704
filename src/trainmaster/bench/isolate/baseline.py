"""Baseline of a healthy pair and its scatter, estimated from results of which some are bad.

Faults only slow. So the healthy results are the upper crowd, even where they are fewer than half: a bad leaf among
three racks slows two of every three cross-rack pairs. Several positions of the crowd are tried, and the one whose
explanation of all results is likeliest is kept (`judge.explain`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

_STARTS = (0.5, 0.7, 0.85)  # quantiles from which the crowd is looked for
_FEW = 24
_LEAST_START, _MOST_NOISE = 0.03, 0.6  # a few results that happen to agree do not prove that noise is small
_USUAL_NOISE, _USUAL_WEIGHT = 0.05, 4  # what is assumed of noise before it is seen, worth so many results
_MAD = 1.4826  # median absolute deviation → sigma, for a normal distribution


def crowds(values: Sequence[float]) -> list[tuple[float, float]]:
    """Candidate healthy crowds as (centre, sigma) of the given logarithms, likeliest first."""
    ordered = sorted(values)
    candidates: list[tuple[float, float]] = []
    # Among few results the crowd may be a single one: two of three pairs of three nodes are slow with one of them.
    for start in _STARTS if len(ordered) > _FEW else (*_STARTS, 1.0):
        centre, sigma = _settle(ordered, ordered[int(start * (len(ordered) - 1))])
        if all(abs(centre - other) > sigma for other, _ in candidates):
            candidates.append((centre, sigma))
    return candidates


def spread(residuals: Sequence[float]) -> float:
    """Sigma of healthy results about their centre, drawn towards the usual noise where they are few."""
    seen, many = _MAD * median(abs(r) for r in residuals), len(residuals)
    drawn = (many * seen**2 + _USUAL_WEIGHT * _USUAL_NOISE**2) / (many + _USUAL_WEIGHT)
    return min(math.sqrt(drawn), _MOST_NOISE)


def _settle(ordered: Sequence[float], centre: float) -> tuple[float, float]:
    sigma = _LEAST_START
    for _ in range(6):
        # The upper side alone: the lower one may hold slow pairs.
        above = [value - centre for value in ordered if value >= centre]
        sigma = min(max(_MAD * median(above), _LEAST_START), _MOST_NOISE) if above else sigma
        near = [value for value in ordered if abs(value - centre) <= 2.5 * sigma]
        moved = median(near) if near else centre
        if moved == centre:
            break
        centre = moved
    return centre, sigma
