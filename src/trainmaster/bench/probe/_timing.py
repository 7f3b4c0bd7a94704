"""Timing of device work: warm up, then rounds that are apart in time, each the median of many repeats.

A kernel is started and not waited for, so a host clock around it measures nothing. On a GPU each repeat stands between
two events that the device itself stamps; elsewhere a call ends when it returns. Several kinds of work take turns, round
by round: a disturbance of a moment spoils one round of each instead of every round of one.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainmaster.bench.probe._run import wait

ROUNDS = 3  # a rate is called too low only when every one of them is
# An idle GPU runs at a fifth of its clock and needs a few hundred milliseconds of work to raise it.
WARM_UP_S = 0.3
ROUND_S = 0.25
# A burst: over before the power controller slows the chip down, and far enough from the last one to start cool.
BURST_REST_S, BURST_FIRST, BURST_REPEATS = 1.0, 5, 10
REPEATS = (5, 400)  # least and most of a round


def time_rounds(device: torch.device, works: Mapping[str, Callable[[], object]]) -> dict[str, list[list[float]]]:
    """Seconds of every repeat: by work, by round."""
    budget_s = 1.0 if device.type == "cuda" else 0.05  # a CPU only shows that the code runs
    repeats = {name: _repeats(_warm_up(device, work, WARM_UP_S * budget_s), budget_s) for name, work in works.items()}
    seconds: dict[str, list[list[float]]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            seconds[name].append(time_each(device, work, repeats[name]))
    return seconds


def time_bursts(device: torch.device, work: Callable[[], object]) -> list[list[float]]:
    """Seconds of every repeat in short bursts with a rest before each: what the chip can do, not what it can hold."""
    seconds = []
    for _ in range(ROUNDS):
        wait(device)
        if device.type == "cuda":
            time.sleep(BURST_REST_S)
        seconds.append(time_each(device, work, BURST_FIRST + BURST_REPEATS)[BURST_FIRST:])
    return seconds


def time_each(device: torch.device, work: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of `count` calls, on the device's current stream."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(count):
            work()
            marks.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(marks)]
    events = [stamp() for _ in range(count + 1)]
    with torch.cuda.device(device):
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
    wait(device)
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]


def stamp() -> torch.cuda.Event:
    """A mark that the device stamps with its time when it comes to it."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def rates(rounds: list[list[float]], amount: float) -> dict[str, Any]:
    """Amount per second: each round's median, the best and the middle round, how far single repeats spread."""
    medians = [amount / statistics.median(seconds) for seconds in rounds]
    every = sorted(amount / second for seconds in rounds for second in seconds)
    middle = statistics.median(medians)
    low, high = every[len(every) // 20], every[-1 - len(every) // 20]
    return {
        "best": _short(max(medians)),
        "median": _short(middle),
        "rounds": [_short(rate) for rate in medians],
        "spread": round((high - low) / middle, 4),  # of nine repeats in ten, as a share of the middle
        "repeats": sum(map(len, rounds)),
    }


def _short(rate: float) -> float:
    return float(f"{rate:.5g}")


def _warm_up(device: torch.device, work: Callable[[], object], seconds: float) -> float:
    """Call it for a while; seconds of one call at the end of that."""
    work()
    wait(device)
    started = time.perf_counter()
    call_s = 0.0
    while time.perf_counter() - started < seconds:
        call_s = min(time_each(device, work, 3))
    return call_s or min(time_each(device, work, 3))


def _repeats(one_s: float, budget_s: float) -> int:
    least, most = REPEATS
    return max(least, min(most, round(ROUND_S * budget_s / max(one_s, 1e-6))))
