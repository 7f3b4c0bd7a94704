"""`make fuzz`: the seeded cases in bulk. A case that fails is named by its parser and seed, and can be run alone."""

from __future__ import annotations

import argparse
import sys

from fuzz import judges, oracle, workers
from fuzz.targets import TARGETS


def main() -> int:
    arguments = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    arguments.add_argument("--cases", type=int, default=100_000, help="for each parser, and for the judges")
    arguments.add_argument("--seed", type=int, default=0, help="of the first case")
    arguments.add_argument("--processes", type=int, help="number of worker processes; one per core unless stated")
    names = [*(target.name for target in TARGETS), judges.NAME]
    arguments.add_argument("--only", choices=names, help="one parser, or the judges")
    chosen = arguments.parse_args()
    failed = 0
    for target in TARGETS:
        if chosen.only in (None, target.name):
            failed += workers.fire(
                target.name,
                lambda case, target=target: oracle.run(target, case),
                seed=chosen.seed, cases=chosen.cases, processes=chosen.processes,
            )  # fmt: skip
    if chosen.only in (None, judges.NAME):
        field = judges.open_field()
        failed += workers.fire(
            judges.NAME,
            lambda case: judges.run(field, case),
            seed=chosen.seed, cases=chosen.cases, processes=chosen.processes,
        )  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
