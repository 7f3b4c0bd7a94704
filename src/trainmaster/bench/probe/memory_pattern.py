"""Whether a GPU's memory holds what is written to it: patterns over much of it, written, read back, compared there.

All chunks are held at once and all are written before the first is read, so that different cells are tested and what
is read comes from memory and not from a cache. Patterns: all bits, none, alternating both ways, a one and a zero that
walk through every bit position, and each word's own address and its complement, which show cells that answer for
others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from trainmaster.bench import nvml
from trainmaster.bench.probe._run import Run, wait

DEADLINE_S = 110.0
SHARE = 0.25  # of the free memory; --whole takes all but the headroom
HEADROOM = (1 << 30, 0.04)  # bytes and share left alone: the comparison's own memory, and other processes'
CHUNK = 512 << 20
# Where the walking bit starts. It moves on with every word, so one walk sets every bit of the bus, and each further
# walk tries other bits of each cell.
WALKS = (0, 21, 42)
WHOLE_WALKS = tuple(range(0, 64, 4))
SHOWN = 4  # wrong words that are told one by one

# (chunk, number of its first word) → fills it.
Fill = Callable[[torch.Tensor, int], torch.Tensor]


def measure(run: Run) -> None:
    run.step("allocation")
    chunks = _allocate(run)
    words = sum(map(len, chunks))
    run.results["bytes"] = words * 8
    run.results["memory_bytes"] = torch.cuda.mem_get_info(run.device)[1] if run.on_gpu else words * 8
    sensor = nvml.open_sensor(run.device)
    run.results["ecc_before"] = sensor.memory_errors() if sensor else None
    scratch = torch.empty_like(chunks[0])
    mismatches: list[dict[str, Any]] = []
    done: list[str] = []
    run.results.update(patterns=done, wrong_words=0, wrong=mismatches)
    started = time.perf_counter()
    for name, fill in patterns(run.whole).items():
        run.step(f"pattern {name}")
        first = 0
        for chunk in chunks:
            fill(chunk, first)
            first += len(chunk)
        wait(run.device)
        first = 0
        for number, chunk in enumerate(chunks):
            expected = fill(scratch[: len(chunk)], first)
            count = int((chunk != expected).sum().item())
            if count:
                run.results["wrong_words"] += count
                mismatches.append(
                    {"pattern": name, "chunk": number, "words": count, **_describe_mismatch(chunk, expected)}
                )
            first += len(chunk)
        done.append(name)
        run.results["seconds"] = round(time.perf_counter() - started, 3)
    run.results["ecc_after"] = sensor.memory_errors() if sensor else None


def patterns(whole: bool) -> dict[str, Fill]:
    """By name, in the order they are written."""
    constants = {"zeros": 0, "ones": -1, "0x55": 0x5555555555555555, "0xaa": -0x5555555555555556}
    fills: dict[str, Fill] = {name: _constant(value) for name, value in constants.items()}
    fills["address"] = _address
    fills["address_inverted"] = lambda chunk, first: _address(chunk, first).bitwise_not_()
    for start in WHOLE_WALKS if whole else WALKS:
        fills[f"walking_one_{start}"] = _walking(start)
    for start in WHOLE_WALKS if whole else WALKS[:1]:
        walk = _walking(start)
        fills[f"walking_zero_{start}"] = lambda chunk, first, walk=walk: walk(chunk, first).bitwise_not_()  # type: ignore[misc]
    return fills


def _constant(value: int) -> Fill:
    return lambda chunk, _: chunk.fill_(value)


def _address(chunk: torch.Tensor, first: int) -> torch.Tensor:
    # Multiplied by an odd number: different for every word, and every bit of it changes somewhere.
    return torch.arange(first, first + len(chunk), out=chunk).mul_(0x1E3779B97F4A7C15)


def _walking(start: int) -> Fill:
    def fill(chunk: torch.Tensor, first: int) -> torch.Tensor:
        unit = torch.ones((), dtype=torch.int64, device=chunk.device)
        torch.arange(first + start, first + start + len(chunk), out=chunk)
        return torch.bitwise_left_shift(unit, chunk.bitwise_and_(63), out=chunk)

    return fill


def _allocate(run: Run) -> list[torch.Tensor]:
    free = run.free_bytes()
    if run.on_gpu:
        left = max(HEADROOM[0], int(free * HEADROOM[1])) + 3 * CHUNK  # scratch, and what a comparison makes
        budget = free - left if run.whole else min(free - left, int(free * SHARE))
        chunk = CHUNK
    else:
        budget, chunk = 4 << 20, 1 << 20
    count = budget // chunk
    if count < 1:
        raise RuntimeError(f"only {free >> 20} MiB of the GPU's memory are free: too little to test")
    return [torch.empty(chunk // 8, dtype=torch.int64, device=run.device) for _ in range(count)]


def _describe_mismatch(chunk: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    """The first wrong words, and whether they read the same again: a bad cell stays, a bad transfer passes."""
    places = (chunk != expected).nonzero().flatten()
    shown = [
        {"word": place, "expected": _hex(expected[place]), "read": _hex(chunk[place])}
        for place in places[:SHOWN].tolist()
    ]
    return {"again": len(places), "shown": shown}


def _hex(word: torch.Tensor) -> str:
    return f"{int(word.item()) & 0xFFFFFFFFFFFFFFFF:#018x}"
