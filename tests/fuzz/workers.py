"""Cases in several processes: each worker takes the next block of seeds and counts outcomes."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_BLOCK = 500  # cases per block: about a second of work
_SHOWN = 5


@dataclass(slots=True, kw_only=True)
class Tally:
    """Outcomes of some cases, and the failed ones with their tracebacks."""

    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)


_cases: list[Callable[[int], str]] = []  # what the workers run: set before the fork, so that nothing is pickled


def fire(name: str, run: Callable[[int], str], *, seed: int, cases: int, processes: int | None = None) -> int:
    """Run the cases, print the sum of their outcomes, and return the number that failed."""
    started, whole = time.perf_counter(), Tally()
    _cases[:] = [run]
    blocks = [(start, min(_BLOCK, seed + cases - start)) for start in range(seed, seed + cases, _BLOCK)]
    for part in _parts(blocks, min(processes or os.cpu_count() or 1, len(blocks))):
        whole.kinds += part.kinds
        whole.failures += part.failures
    for case, trace in sorted(whole.failures)[:_SHOWN]:
        print(f"{name}: case {case} (make fuzz ARGS='--only {name} --seed {case} --cases 1')\n{trace}")
    took = time.perf_counter() - started
    told = ", ".join(f"{kind} {count:,}" for kind, count in sorted(whole.kinds.items()))
    failed = len(whole.failures)
    print(f"{name:12} {cases:>9,} cases {took:7.1f} s {cases / took:>8,.0f}/s  {failed} failed  ({told})", flush=True)
    return failed


def _parts(blocks: list[tuple[int, int]], processes: int) -> Iterator[Tally]:
    if processes < 2:
        yield from map(_count, blocks)
        return
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        yield from pool.imap_unordered(_count, blocks)


def _count(block: tuple[int, int]) -> Tally:
    (run,), tally = _cases, Tally()
    for case in range(block[0], block[0] + block[1]):
        try:
            tally.kinds[run(case)] += 1
        except Exception:  # any other error is exactly what is looked for
            tally.failures.append((case, traceback.format_exc()))
    return tally
