"""`make chaos`: every kill alone, then every kill with every kind of damage. Ends 0, 1 broken, 3 something not reached.

A case that fails is named by its seed and number, and can be run alone: make chaos ARGS='--seed 7 --case 31'
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import cases, damage
from .cases import Case
from .oracle import Broken, Lived, Matrix, NotReached
from .warm import Warm

Outcome = Lived | Exception


def main() -> int:
    arguments = argparse.ArgumentParser(prog="chaos", description=__doc__)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--case", type=int, help="this one alone, with its folder kept")
    arguments.add_argument("--only", default="", help="cases whose name holds this text")
    arguments.add_argument("--jobs", type=int, default=2, help="at the same time")
    arguments.add_argument("--list", action="store_true", help="print the cases and do nothing")
    chosen = arguments.parse_args()
    wanted = {
        number: case
        for number, case in enumerate(draw(chosen.seed))
        if chosen.case in (None, number) and chosen.only in case.name
    }
    if chosen.list:
        for number, case in wanted.items():
            print(f"{number:4} {case.name}")
        return 0
    started = time.monotonic()
    outcomes = live_all(wanted, jobs=chosen.jobs, keep=chosen.case is not None, seed=chosen.seed)
    return tell(wanted, outcomes, seconds=time.monotonic() - started)


def draw(seed: int) -> list[Case]:
    """The whole matrix of one seed."""
    points = list(cases.kills(seed, places=cases.LOCAL))
    tiered = list(cases.tiered(seed))
    kinds = tuple(kind for kind in damage.KINDS if damage.why_not(kind) is None)
    return [*points, *tiered, *cases.damages(seed, kinds, points)]


def live_all(wanted: dict[int, Case], *, jobs: int, keep: bool, seed: int) -> dict[int, Outcome]:
    home = Path(tempfile.mkdtemp(prefix="chaos-"))
    own = threading.local()
    warmed: list[tuple[Warm, Matrix]] = []
    outcomes: dict[int, Outcome] = {}

    def live(number: int) -> None:
        if not hasattr(own, "matrix"):
            warm = Warm()
            own.matrix = Matrix(home / uuid.uuid4().hex[:8], warm)
            warmed.append((warm, own.matrix))
        case = wanted[number]
        try:
            outcomes[number] = own.matrix.live(case)
        except Exception as error:
            outcomes[number] = error
            word = {Broken: "BROKEN", NotReached: "not reached"}.get(type(error), "ERROR")
            print(f"{word}: {case.name}: {error}\n    make chaos ARGS='--seed {seed} --case {number}'", flush=True)
            if word == "ERROR":
                traceback.print_exception(error)
        if len(outcomes) % 20 == 0:
            print(f"{len(outcomes)} of {len(wanted)} cases", flush=True)

    try:
        with ThreadPoolExecutor(jobs) as pool:
            try:
                list(pool.map(live, wanted))
            except BaseException:
                pool.shutdown(cancel_futures=True)  # Ctrl-C: the cases under way end, no other begins
                raise
    finally:
        for warm, matrix in warmed:
            warm.close()
            matrix.close()
        if keep:
            print(f"its files are in {home}")
        else:
            shutil.rmtree(home, ignore_errors=True)
    return outcomes


def tell(wanted: dict[int, Case], outcomes: dict[int, Outcome], *, seconds: float) -> int:
    """The table, place by damage, and the totals; the exit code."""
    good: dict[tuple[str, str], Counter[bool]] = defaultdict(Counter)
    for number, case in wanted.items():
        good[case.place, case.damage or "none"][isinstance(outcomes.get(number), Lived)] += 1
    kinds = [kind for kind in ("none", *damage.KINDS) if any(key[1] == kind for key in good)]
    print(f"\n{'killed at':<17}" + "".join(f"{kind:>23}" for kind in kinds))
    for place in dict.fromkeys(case.place for case in wanted.values()):
        cells = [good.get((place, kind), Counter()) for kind in kinds]
        print(f"{place:<17}" + "".join(f"{f'{c[True]}/{c.total()}' if c else '–':>23}" for c in cells))
    for kind in damage.KINDS:
        if kind not in kinds:
            print(f"{kind}: not run, {damage.why_not(kind) or 'not asked for'}")
    lived = [outcome for outcome in outcomes.values() if isinstance(outcome, Lived)]
    broken = sum(
        isinstance(outcome, Exception) and not isinstance(outcome, NotReached) for outcome in outcomes.values()
    )
    missed = len(wanted) - len(lived) - broken
    kills = [one for one in lived if one.case.damage is None]
    print(
        f"\n{len(wanted)} cases in {seconds:.0f} s: {len(lived)} as promised, {broken} broken, {missed} not reached; "
        f"at most {max((one.lost for one in kills), default=0)} steps lost to a kill alone, "
        f"saving every {cases.EVERY} steps"
    )
    return 1 if broken else 3 if missed or not lived else 0


if __name__ == "__main__":
    sys.exit(main())
