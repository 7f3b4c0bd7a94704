"""`make chaos-control`: a job of 3 × 5 epochs, its control plane killed at every commit and effect, each in turn.

An undisturbed run writes down every place it comes by. Then each place has a run of its own: SIGKILL there, a new
control plane, to the end; its rows must be those of the undisturbed run. On SQLite and on PostgreSQL, with one control
plane and with two at once. One case alone: ARGS='--database sqlite --planes 1 --place "call submit: after 1"'
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from postgres import Postgres, binaries

from .story import Case, Told, number
from .warm import Warm

KINDS = ("sqlite", "postgresql")
_TRIES = 5  # to come by a place that an undisturbed run came by


@dataclass(frozen=True, kw_only=True)
class Wanted:
    kind: str
    planes: int
    place: str  # empty: everywhere in one run

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.planes} at once, {self.place or 'everywhere in one run'}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos-control", description=__doc__)
    parser.add_argument("--database", choices=KINDS, help="not stated: both")
    parser.add_argument("--planes", type=int, choices=(1, 2), help="not stated: both")
    parser.add_argument("--place", help="this place alone, with its folder kept")
    parser.add_argument("--sample", type=int, help="so many places of each kind, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="at the same time")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-control-"))
    started = time.monotonic()
    programs = binaries()
    kinds = [chosen.database] if chosen.database else list(KINDS) if programs else ["sqlite"]
    server = Postgres(programs) if programs and "postgresql" in kinds else None
    if server is None:
        print("no PostgreSQL server here: its half is not run")
    try:
        runner = Runner(folder, server)
        plain = runner.live(Wanted(kind="sqlite", planes=1, place=""), undisturbed=True)
        places = [chosen.place] if chosen.place else number(plain.places)
        print(f"{len(places)} places in an undisturbed run")
        planes = [chosen.planes] if chosen.planes else [1, 2]
        wanted = list(draw(places, kinds, planes, sample=chosen.sample, seed=chosen.seed, whole=not chosen.place))
        with ThreadPoolExecutor(chosen.jobs) as pool:
            verdicts = list(pool.map(lambda case: runner.judge(case, plain), wanted))
        failed = [case for case, ok in zip(wanted, verdicts, strict=True) if not ok]
    finally:
        if server is not None:
            server.close()
    took = f"{time.monotonic() - started:.0f} s"
    print(f"{len(wanted)} runs, {runner.deaths} deaths, {len(failed)} wrong, {runner.missed} not reached, {took}")
    if not failed and not chosen.place:
        shutil.rmtree(folder)
    else:
        print(f"kept: {folder}")
    return 1 if failed else 0 if server is not None or chosen.database else 3


def draw(
    places: Sequence[str], kinds: Sequence[str], planes: Sequence[int], *, sample: int | None, seed: int, whole: bool
) -> Iterator[Wanted]:
    for kind, many in itertools.product(kinds, planes):
        dice = random.Random(f"{seed} {kind} {many}")
        chosen = dice.sample(places, min(sample, len(places))) if sample is not None else places
        if whole:
            yield Wanted(kind=kind, planes=many, place="")
        for place in chosen:
            yield Wanted(kind=kind, planes=many, place=place)


class Runner:
    """Lives through cases in folders of their own; each thread has its own warmed process."""

    def __init__(self, folder: Path, server: Postgres | None) -> None:
        self.folder, self.server, self.deaths, self.missed = folder, server, 0, 0
        self._own, self._lock, self._numbers = threading.local(), threading.Lock(), itertools.count()

    def live(self, wanted: Wanted, *, undisturbed: bool = False) -> Told:
        if not hasattr(self._own, "warm"):
            self._own.warm = Warm()
        home = self.folder / str(next(self._numbers))
        home.mkdir()
        url = str(home / "trainmaster.db") if wanted.kind == "sqlite" or self.server is None else self.server.create()
        case = Case(self._own.warm, home, url, planes=wanted.planes)
        if undisturbed:
            return case.undisturbed()
        return case.killed_at(wanted.place) if wanted.place else case.killed_everywhere()

    def judge(self, wanted: Wanted, plain: Told) -> bool:
        for _ in range(_TRIES):
            began = time.monotonic()
            try:
                told = self.live(wanted)
            except Exception as error:
                return self._say(wanted, f"{type(error).__name__}: {error}"[:2000], began, ok=False)
            with self._lock:
                self.deaths += told.deaths
            if told.ledger != plain.ledger:
                tables = [name for name in plain.ledger if plain.ledger[name] != told.ledger[name]]
                return self._say(wanted, f"other rows in {', '.join(tables)}", began, ok=False)
            # With two at once the second may do the work. With one, lines that came together are one commit fewer.
            if told.deaths or wanted.planes > 1:
                return self._say(wanted, f"{told.deaths} deaths", began, ok=True)
        with self._lock:
            self.missed += 1
        return self._say(wanted, "nobody came by", began, ok=True)

    def _say(self, wanted: Wanted, text: str, began: float, *, ok: bool) -> bool:
        with self._lock:
            print(f"{'ok   ' if ok else 'WRONG'} {time.monotonic() - began:6.1f} s  {wanted.name}: {text}", flush=True)
        return ok


if __name__ == "__main__":
    sys.exit(main())
