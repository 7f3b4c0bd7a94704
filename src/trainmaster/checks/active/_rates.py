"""Judge a measured rate against the stated one, the best known of this GPU model, and the equal GPUs of the node.

A pass means measured and compared. A rate without any comparison is a warning that names the option for stating one. A
rate is too low only if its best round is, so one disturbed moment fails no GPU.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainmaster.checks.active._probe import Report, number
from trainmaster.core.results import WEIGHT, Finding, Verdict

ABSURD = 3.0  # times the second fastest: no GPU of the same model is
LEAST_PEERS = 3  # GPUs of one model in the node; of two, the odd one cannot be told
OUTLIER_Z = 5.0  # scaled MADs below the median
PEER_WARN, PEER_FAIL = 0.93, 0.80  # of the median; equal GPUs differ by some 3 % in clock at one power limit
HALF_FAIL = 0.6  # of the upper quartile, whatever the spread: no setting or slot explains that much
NOISE = 0.005  # of the median: GPUs that agree to the last digit must not make a rounding error an outlier
UNSTEADY = 0.85  # the middle round below this share of the best: something disturbs it
IMPOSSIBLE = 1.25  # of a datasheet's peak: the clock that timed it is wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """Known rate, and the shares of it below which a measured rate warns or fails."""

    rate: float
    words: str  # "best measured", "datasheet"
    fail_below: float
    warn_below: float = 0.0
    peak: float | None = None  # nothing can be faster than that


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Verdict of one rate, with its sentence."""

    verdict: Verdict
    words: str
    action: str | None = None
    compared: bool = True


def rounds_of(rates: Mapping[str, Any]) -> tuple[float, ...]:
    """Rounds of a rate as a probe prints it (bench/probe/_timing.py); each must be above zero."""
    rounds = rates.get("rounds")
    if not isinstance(rounds, list) or not rounds:
        raise ValueError(f"rounds is {rounds!r:.40}")
    numbers = tuple(number({"a round": value}, "a round") for value in rounds)
    if min(numbers) <= 0:
        raise ValueError(f"a round is {min(numbers):g}")
    return numbers


def peers_of(report: Report, every: Mapping[str, Report], pick: Callable[[Mapping[str, Any]], float]) -> list[float]:
    """Rate of every GPU of this model. A GPU with an unreadable report has its own finding and is no peer."""
    rates = []
    for other in every.values():
        if other.name == report.name:
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
                rates.append(pick(other.results))
    return rates


def judge(
    rounds: Sequence[float],
    what: str,
    *,
    stated: float | None,
    state_as: str,
    known: Yardstick | None,
    peers: Sequence[float],
    slow: str,
) -> Judged:
    """Judge one rate. `peers`: best rounds of the equal GPUs, this one included; `slow`: the action for a low rate."""
    best, middle = max(rounds), statistics.median(rounds)
    if known is not None and known.peak is not None and best > IMPOSSIBLE * known.peak:
        words = f"{best:,.4g} {what} is more than the chip can do ({known.peak:g}): the timing is wrong"
        return Judged(verdict=Verdict.ERROR, words=words, action="check the machine's clock, then run this again")
    if known is not None and known.peak is not None:
        peers = [peer for peer in peers if peer <= IMPOSSIBLE * known.peak]
    judgements = []
    if stated is not None:
        judgements.append(_against(best, what, Yardstick(rate=stated, words="stated", fail_below=1.0), slow))
    elif known is not None:
        judgements.append(_against(best, what, known, slow))
    if len(peers) >= LEAST_PEERS:
        judgements.append(_among(best, what, peers, slow))
    if not judgements:
        words = f"{best:,.4g} {what}, not compared: no baseline for this model, fewer than {LEAST_PEERS} here"
        return Judged(
            verdict=Verdict.WARN,
            words=words,
            action=f"state what it should reach: --expect {state_as}=N",
            compared=False,
        )
    if middle < UNSTEADY * best:
        shown = ", ".join(f"{rate:,.4g}" for rate in rounds)
        words = f"{what} is unsteady: {shown} in {len(rounds)} rounds"
        action = "see what else runs on the node, and whether the GPU throttles; then run this again"
        judgements.append(Judged(verdict=Verdict.WARN, words=words, action=action))
    return worst(judgements)


def worst(judgements: Sequence[Judged]) -> Judged:
    """The first of the worst."""
    return max(judgements, key=lambda judged: WEIGHT[judged.verdict])


def combine(device: str, judgements: Sequence[Judged], *, note: str = "", **values: Any) -> Finding:
    """One finding of several judgements: the reason names those that do not pass, or all if all pass."""
    top = worst(judgements)
    shown = [judged for judged in judgements if judged.verdict is not Verdict.PASS] or list(judgements)
    shown.sort(key=lambda judged: -WEIGHT[judged.verdict])
    reason = "; ".join(dict.fromkeys(judged.words for judged in shown))
    if top.verdict is not Verdict.PASS:
        reason += note
    return Finding(verdict=top.verdict, reason=reason, action=top.action, device=device, values=values)


def _against(best: float, what: str, known: Yardstick, slow: str) -> Judged:
    share = best / known.rate
    words = f"{best:,.4g} {what}, {share:.0%} of the {known.rate:,.4g} {known.words}"
    if share < known.fail_below:
        words += " in the best round"
        return Judged(verdict=Verdict.FAIL, words=words, action=slow)
    if share < known.warn_below:
        return Judged(verdict=Verdict.WARN, words=words, action=slow)
    return Judged(verdict=Verdict.PASS, words=words)


def _among(best: float, what: str, peers: Sequence[float], slow: str) -> Judged:
    """Judge by the median where the GPUs agree, and by the faster ones where so many are slow that it moves."""
    median = statistics.median(peers)
    spread = 1.4826 * statistics.median(abs(peer - median) for peer in peers)
    far = (median - best) / max(spread, NOISE * median) > OUTLIER_Z
    share = best / median
    words = f"{best:,.4g} {what}, {share:.0%} of the median of the {len(peers)} equal GPUs here"
    if share < PEER_FAIL and far:
        return Judged(verdict=Verdict.FAIL, words=words, action=slow)
    # One GPU that is far faster than all others was measured wrongly, and accuses none of them.
    second, top = sorted(peers)[-2:]
    top = top if top <= ABSURD * second else second
    upper = min(second, statistics.quantiles(peers, n=4, method="inclusive")[2])
    if best < PEER_FAIL * top and not far:
        words = f"{best:,.4g} {what}, where equal GPUs here reach {top:,.4g}: they differ, none can be called usual"
        verdict = Verdict.FAIL if best < HALF_FAIL * upper else Verdict.WARN
        return Judged(verdict=verdict, words=words, action=slow)
    if share < PEER_WARN and far:
        return Judged(verdict=Verdict.WARN, words=words, action=slow)
    return Judged(verdict=Verdict.PASS, words=words)
