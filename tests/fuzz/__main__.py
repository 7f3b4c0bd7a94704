"""`make fuzz`: the seeded cases in bulk. A case that fails is named by its parser and seed, and can be run alone."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable

from fuzz import judges, oracle
from fuzz.targets import TARGETS


def main() -> int:
    arguments = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    arguments.add_argument("--cases", type=int, default=100_000, help="for each parser, and for the judges")
    arguments.add_argument("--seed", type=int, default=0, help="of the first case")
    names = [*(target.name for target in TARGETS), judges.NAME]
    arguments.add_argument("--only", choices=names, help="one parser, or the judges")
    chosen = arguments.parse_args()
    failed = 0
    for target in TARGETS:
        if chosen.only in (None, target.name):
            failed += fire(target.name, chosen.seed, chosen.cases)
    if chosen.only in (None, judges.NAME):
        failed += fire_judges(chosen.seed, chosen.cases)
    return 1 if failed else 0


def fire(name: str, seed: int, cases: int) -> int:
    """Run the cases of one parser; how many broke a promise."""
    target = next(target for target in TARGETS if target.name == name)
    return _fire(name, lambda case: oracle.run(target, case), seed, cases)


def fire_judges(seed: int, cases: int) -> int:
    """Damage an answer, judge it; how many damaged inputs were judged PASS."""
    every = judges.open_scenes()
    return _fire(judges.NAME, lambda case: judges.run(every, case), seed, cases)


def _fire(name: str, run: Callable[[int], str], seed: int, cases: int) -> int:
    """Run the cases, print their sum, and return how many failed."""
    kinds: Counter[str] = Counter()
    failed = 0
    started = time.perf_counter()
    for case in range(seed, seed + cases):
        try:
            kinds[run(case)] += 1
        except Exception:  # any other error is exactly what is looked for
            failed += 1
            if failed <= 5:
                print(f"{name}: case {case} (make fuzz ARGS='--only {name} --seed {case} --cases 1')")
                traceback.print_exc()
    took = time.perf_counter() - started
    told = ", ".join(f"{kind} {count:,}" for kind, count in sorted(kinds.items()))
    print(f"{name:12} {cases:>9,} cases {took:7.1f} s {cases / took:>8,.0f}/s  {failed} failed  ({told})", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
