"""`make fuzz`: the seeded cases in bulk. A case that fails is named by its parser and seed, and can be run alone."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from fuzz import oracle
from fuzz.targets import TARGETS


def main() -> int:
    arguments = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    arguments.add_argument("--cases", type=int, default=100_000, help="for each parser")
    arguments.add_argument("--seed", type=int, default=0, help="of the first case")
    arguments.add_argument("--only", choices=[target.name for target in TARGETS], help="one parser")
    chosen = arguments.parse_args()
    failed = 0
    for target in TARGETS:
        if chosen.only in (None, target.name):
            failed += fire(target.name, chosen.seed, chosen.cases)
    return 1 if failed else 0


def fire(name: str, seed: int, cases: int) -> int:
    """Run the cases of one parser and print their sum; how many broke a promise."""
    target = next(target for target in TARGETS if target.name == name)
    kinds: Counter[str] = Counter()
    failed = 0
    started = time.perf_counter()
    for case in range(seed, seed + cases):
        try:
            kinds[oracle.run(target, case)] += 1
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
