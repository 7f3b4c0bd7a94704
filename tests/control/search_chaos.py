"""A search through the real reconciler, which is killed again and again: the same trials as undisturbed, none twice.

    python -m control.search_chaos --trials 200 --kills 50 --seed 0        make chaos-search

Trials are files: an attempt begins when its file is made, which happens once, writes its reports in the next tenth of a
second and is over. Half of the kills are at a place of the control plane (before or after a commit or a call), half at
any moment. With `--parallel 1` the disturbed search must equal the undisturbed one in values, states and results. With
more at once the order of ends is a matter of time: then Optuna is asked again for each trial with what the rows say it
saw, and must propose the same.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from control.search_rows import find_deviations, list_results
from trainmaster.control import failpoints, reconcile
from trainmaster.control.queueing import sets
from trainmaster.core.config.sweep import parse_sweep
from trainmaster.core.errors import UsageError
from trainmaster.core.plan import EVENTS_FILE, ExitRecord
from trainmaster.core.states import Reason, TargetState
from trainmaster.store.capacity import searches
from trainmaster.store.capacity import sets as store
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database
from trainmaster.targets import FileSize, Handle, Placement, Poll, Submission

_RUN_S = 0.1
_REPORTS = 5
_PLACES = [
    f"{what}: {when}"
    for what in ("commit trial", "commit search report", "call submit", "commit submitted")
    for when in ("before", "after")
]
_MOMENT, _OVER = "any moment", "over"
_LONG_S = 900.0  # of one life


class Place:
    """Trials as files of a folder; what one reports follows from its values."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, word: str) -> Place:
        if word != "trials":
            raise UsageError(f"target: {word!r} is not trials")
        return self

    def plan(self, placement: Placement) -> Submission:
        spec = placement.spec
        handle = {"attempt": placement.attempt, "name": spec.name, "values": dict(spec.env)}
        return Submission(handle=handle, files={}, commands=())

    async def submit(self, submission: Submission) -> Handle:
        with contextlib.suppress(FileExistsError):  # it was begun, and nobody had written that down
            self._file(submission.handle).touch(exist_ok=False)
        return {**submission.handle, "submitted": True}

    async def poll(self, handle: Handle) -> Poll:
        age, stopped = self._age_s(handle), self._stop(handle).exists()
        if age is None:
            return Poll(state=TargetState.LOST if handle.get("submitted") else TargetState.WAITING)
        if age < _RUN_S and not stopped:
            return Poll(state=TargetState.RUNNING)
        reason = Reason.USER_CANCELLED if stopped else None
        at = datetime.now(UTC).isoformat()
        record = ExitRecord(attempt=str(handle["attempt"]), ok=not stopped, ended_at=at, reason=reason, message="")
        return Poll(state=TargetState.FAILED if stopped else TargetState.SUCCEEDED, exit=record)

    async def read(self, handle: Handle, stream: str, *, offset: int, limit: int) -> bytes:
        return self._events(handle)[offset : offset + limit] if stream == EVENTS_FILE else b""

    async def list_files(self, handle: Handle) -> list[FileSize]:
        return [FileSize(name=EVENTS_FILE, size_bytes=len(self._events(handle)))]

    async def cancel(self, handle: Handle, *, reason: str) -> None:
        self._stop(handle).touch()

    async def release(self, handle: Handle) -> None:
        pass

    def _file(self, handle: Handle) -> Path:
        """Its name says all: a server that is killed leaves no half of a file."""
        return self._folder / f"{handle['name']}@{handle['attempt']}"

    def _stop(self, handle: Handle) -> Path:
        return self._folder / f"{handle['attempt']}.stop"

    def _age_s(self, handle: Handle) -> float | None:
        try:
            return time.time() - self._file(handle).stat().st_mtime
        except FileNotFoundError:
            return None

    def _events(self, handle: Handle) -> bytes:
        age = self._age_s(handle)
        if age is None:
            return b""
        values: Any = handle["values"]
        lr, width = float(values["LR"]), int(values["WIDTH"])
        lines: list[dict[str, Any]] = [{"phase": "PREFLIGHT", "event": "end", "data": {"overall": "PASS"}}]
        for step in range(1, 1 + min(_REPORTS, int(_REPORTS * age / _RUN_S))):
            loss = abs(lr - 0.03) + abs(width - 40) / 100 + 1 / step
            lines.append({"phase": "STEP", "event": "metrics", "data": {"step": step, "loss": loss}})
        return "".join(json.dumps(line) + "\n" for line in lines).encode()


@dataclass
class Outcome:
    """What happened."""

    faults: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


def document(*, trials: int, parallel: int, seed: int, pruner: str) -> dict[str, Any]:
    parameters = {"lr": {"float": [0.001, 1.0], "log": True}, "width": {"int": [8, 64], "step": 8}}
    return {
        "name": "chaos", "command": ["true"], "env": {"LR": "{lr}", "WIDTH": "{width}"}, "target": "trials",
        "limits": {"attempts": 1}, "parallel": parallel,
        "search": {"parameters": parameters, "trials": trials, "seed": seed, "pruner": pruner},
    }  # fmt: skip


def drive(home: Path) -> None:
    """A reconciler, until it is killed."""
    db = open_database(home / "trainmaster.db")
    load = Place(home / "trials").load
    asyncio.run(reconcile.run(db, home, stop=asyncio.Event(), tick_s=0.05, load=load))


def run(home: Path, *, trials: int, kills: int, seed: int, parallel: int = 1, pruner: str = "median") -> Outcome:
    begin, outcome = time.monotonic(), Outcome()
    made = document(trials=trials, parallel=parallel, seed=seed, pruner=pruner)
    disturbed = _search(home / "disturbed", made, kills=kills, rng=random.Random(seed), outcome=outcome)
    if parallel == 1 and not outcome.faults:
        calm = _search(home / "calm", made, kills=0, rng=random.Random(seed), outcome=outcome)
        outcome.faults += [
            f"undisturbed {expected}, disturbed {got}"
            for expected, got in zip(calm, disturbed, strict=True)
            if expected != got
        ]
    outcome.states = Counter(str(state) for _, _, state, _, _ in disturbed)
    outcome.seconds = time.monotonic() - begin
    return outcome


def _search(home: Path, made: Any, *, kills: int, rng: random.Random, outcome: Outcome) -> list[tuple[Any, ...]]:
    """Run one search to its end, with so many kills; its trials."""
    (home / "trials").mkdir(parents=True)
    db = open_database(home / "trainmaster.db")
    row = sets.submit_set(db, parse_sweep(made), load=Place(home / "trials").load)
    total = int(made["search"]["trials"])
    try:
        for left in range(kills, -1, -1):
            begun = len(searches.list_trials(db, row.id))
            most = max(1, 2 * (total - begun) // (left + 1) - 1)
            how = _live(home, db, row.id, rng=rng, most=rng.randint(1, most) if left else None)
            if how in (*_PLACES, _MOMENT) and left:
                outcome.kills[how] += 1
            elif how != _OVER or left:
                outcome.faults.append(f"{how}, with {left} kills to go")
                break
        if store.list_unfinished(db):
            outcome.faults.append("it is not over")
        outcome.faults += _find_repeated(home / "trials", total)
        outcome.faults += find_deviations(db, row.id)
        return list_results(db, row.id)
    finally:
        db.close()


def _live(home: Path, db: Database, set_id: str, *, rng: random.Random, most: int | None) -> str:
    """One life of a server, to the end of the search or to a kill after about `most` trials; how it ended."""
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    place = rng.choice(_PLACES) if most is not None and rng.random() < 0.5 else None
    if place is not None:
        environment[failpoints.KILL_AT_VARIABLE] = f"{place} {rng.randint(1, most or 1)}"
    moment_s, limit = rng.uniform(0, 0.3), time.monotonic() + _LONG_S
    words = [sys.executable, "-m", "control.search_chaos", "--drive", str(home)]
    process = subprocess.Popen(words, env=environment)
    begun = len(searches.list_trials(db, set_id))
    try:
        while store.list_unfinished(db):
            time.sleep(0.02)
            if (code := process.poll()) is not None:
                return place if place is not None and code == -signal.SIGKILL else f"a server ended with {code}"
            if most is not None and len(searches.list_trials(db, set_id)) - begun >= most and place is None:
                time.sleep(moment_s)
                return _MOMENT if store.list_unfinished(db) else _OVER
            if time.monotonic() > limit:
                return f"not over after {_LONG_S:g} s"
        return _OVER
    finally:
        process.kill()
        process.wait()


def _find_repeated(folder: Path, total: int) -> list[str]:
    """Trials that began more than once, or never: each file is an attempt."""
    names = Counter(path.name.partition("@")[0] for path in folder.iterdir() if path.suffix != ".stop")
    wanted = {f"chaos-{number}" for number in range(1, total + 1)}
    faults = [f"{name} ran {count} times" for name, count in names.items() if count != 1]
    return faults + [f"{name} never ran" for name in sorted(wanted - names.keys())]


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("--trials", type=int, default=200)
    options.add_argument("--kills", type=int, default=50)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--parallel", type=int, default=1)
    options.add_argument("--pruner", default="median")
    options.add_argument("--drive", type=Path)
    chosen = options.parse_args()
    if chosen.drive is not None:
        drive(chosen.drive)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(
            Path(folder), trials=chosen.trials, kills=chosen.kills, seed=chosen.seed, parallel=chosen.parallel,
            pruner=chosen.pruner,
        )  # fmt: skip
    for fault in outcome.faults[:20]:
        print(fault)
    states = ", ".join(f"{count} {state}" for state, count in outcome.states.items())
    places = ", ".join(f"{count} {place}" for place, count in outcome.kills.most_common())
    print(
        f"{chosen.trials} trials, {chosen.parallel} at once ({states}), {sum(outcome.kills.values())} kills "
        f"({places}), in {outcome.seconds:.0f} s: {len(outcome.faults)} faults"
    )
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
