"""How fast every pair of GPUs in a node exchanges data, each way, and whether it arrives unchanged.

`n` GPUs meet in n-1 rounds of disjoint pairs (n if odd), all pairs of a round at once, first one way and then the
other. One process for all of them: a copy between two GPUs needs both. The pair at work is the step that is told if it
hangs, and what was measured before is kept.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from trainmaster.bench.probe._run import Run, describe, wait
from trainmaster.bench.probe._timing import ROUNDS, stamp

DEADLINE_S = 110.0
BYTES = 256 << 20
REPEATS = 8

Pair = tuple[int, int]


def measure(run: Run) -> None:
    count = len(run.devices)
    if count < 2:
        raise RuntimeError("two GPUs or more are needed")
    size = BYTES if run.on_gpu else 1 << 16
    run.results["gpus"] = [describe(device) for device in run.devices]
    run.results["buffer_bytes"] = size
    run.step("allocation")
    sources = [_content(number, size, device) for number, device in enumerate(run.devices)]
    targets = [torch.zeros_like(source) for source in sources]
    pairs: list[dict[str, Any]] = []
    run.results["pairs"] = pairs
    for number, pairing in enumerate(pair_up(count)):
        for directed in (pairing, [(b, a) for a, b in pairing]):
            run.step(f"round {number}: " + " ".join(f"{a}->{b}" for a, b in directed))
            pairs.extend(_exchange(run, directed, sources, targets, size))


def pair_up(count: int) -> list[list[Pair]]:
    """Every pair exactly once, in rounds in which nobody meets two others: the circle method of a tournament."""
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        met = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def _content(sender: int, size: int, device: torch.device) -> torch.Tensor:
    """What this GPU sends: other data than its peers', which the receiver can make by itself to compare."""
    return torch.arange(size // 4, dtype=torch.int32, device=device).mul_(2 * sender + 3).add_(sender)


def _exchange(
    run: Run, directed: list[Pair], sources: list[torch.Tensor], targets: list[torch.Tensor], size: int
) -> list[dict[str, Any]]:
    for _, b in directed:
        targets[b].zero_()
    rounds: dict[Pair, list[float]] = {pair: [] for pair in directed}
    for number in range(ROUNDS + 1):  # the first opens the way between the two and is not counted
        seconds = _time(run, directed, sources, targets)
        if number:
            for pair in directed:
                rounds[pair].append(size * REPEATS / 1e9 / seconds[pair])
    results = []
    for a, b in directed:
        wrong_bytes = int((targets[b] != _content(a, size, run.devices[b])).sum().item())
        rates = [float(f"{rate:.4g}") for rate in rounds[a, b]]
        results.append(
            {
                "from": a,
                "to": b,
                "direct": run.on_gpu and torch.cuda.can_device_access_peer(run.devices[a], run.devices[b]),
                "gbps": statistics.median(rates),
                "rounds": rates,
                "wrong": wrong_bytes,
            }
        )
    return results


def _time(
    run: Run, directed: list[Pair], sources: list[torch.Tensor], targets: list[torch.Tensor]
) -> dict[Pair, float]:
    """Seconds of all repeats of each pair, while the other pairs are at work too."""
    if not run.on_gpu:
        seconds = {}
        for a, b in directed:
            started = time.perf_counter()
            for _ in range(REPEATS):
                targets[b].copy_(sources[a])
            seconds[a, b] = time.perf_counter() - started
        return seconds
    events = {}
    for a, b in directed:
        with torch.cuda.device(run.devices[a]):  # torch copies on the sender's stream
            before, after = stamp(), stamp()
            before.record()
            for _ in range(REPEATS):
                targets[b].copy_(sources[a], non_blocking=True)
            after.record()
            events[a, b] = (before, after)
    for device in run.devices:
        wait(device)
    return {pair: before.elapsed_time(after) / 1e3 for pair, (before, after) in events.items()}
