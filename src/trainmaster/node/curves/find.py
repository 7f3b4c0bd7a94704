"""Find where a program leaves its figures, and read one such place to its end."""

from __future__ import annotations

import fnmatch
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainmaster.node.curves import Point, Reader, Tail
from trainmaster.node.curves.log_lines import LogLines
from trainmaster.node.curves.tables import LightningTable, MlflowDatabase, MlflowMetric, TrainerState
from trainmaster.node.curves.tensorboard import PATTERN as TENSORBOARD
from trainmaster.node.curves.tensorboard import EventFile
from trainmaster.node.curves.wandb import PATTERN as WANDB
from trainmaster.node.curves.wandb import OfflineRun

READ_FROM = "read_from"  # in an event: the figure was read, the program did not write the event
_LOOK_S = 2.0
# A point has the time at which it was read. Near the start that must be close: what lies before the first step is told
# apart by it, and a run of a few seconds has no other times. A turn of the agent's loop takes as long.
_EARLY_S, _LOOK_EARLY_S = 60.0, 0.2
# The first points are kept back so long: a program that prints a step and then writes its event would have it twice.
_SURE_S = 2.0
_SEARCH_S = 10.0  # between two looks for new files
_ENTRIES, _DEPTH, _FILES = 5_000, 6, 200  # of one search; files that are read
_PASSED = frozenset({".git", ".venv", "node_modules", "__pycache__", "site-packages", ".cache"})


class Curves:
    """Points of the first place that has losses; what lay there before the start is not of this run.

    The Trainer's printed dicts name no step. A place that does is read in their stead as soon as one is found. Its
    `trainer_state.json` is written at saves only: that is read where a step of the dicts is not in it.
    """

    def __init__(self, log: Path, folders: Sequence[Path], events: Path) -> None:
        self._folders = folders
        self._events, self._own = Tail(events), False  # the program writes events itself: nothing is read for it
        self._log = LogLines(log)
        self._readers: dict[Path, Reader] = {log: self._log}
        self._floor: dict[str, int] = {}
        self.source: str | None = None
        self._kept: list[Point] = []
        self._sure_at: float | None = None  # known with the first point
        self._told: dict[str, set[int]] = {"loss": set(), "eval_loss": set()}  # steps read from the log, by figure
        self._began = time.monotonic()
        self._looked = self._searched = float("-inf")
        self._search()
        for reader in self._readers.values():
            while reader.read():
                pass

    def look(self, *, last: bool = False) -> list[Point]:
        """New points; none before the next look is due, unless it is the last."""
        now = time.monotonic()
        every_s = _LOOK_EARLY_S if now - self._began < _EARLY_S else _LOOK_S
        if now - self._looked < every_s and not last:
            return []
        self._looked = now
        self._kept += [replace(point, at=time.time()) for point in self._read(now, last=last)]
        if self._own:
            self._kept.clear()
        if self._kept and self._sure_at is None:
            self._sure_at = now + _SURE_S
        if not last and (self._sure_at is None or now < self._sure_at):
            return []
        points, self._kept = self._kept, []
        return points

    def _read(self, now: float, *, last: bool) -> list[Point]:
        if self._writes_events():
            return []
        if now - self._searched >= _SEARCH_S or last:
            self._search()
        points = self._read_all(last=last)
        if self.source is None and self._log.dicts and any("loss" in p.figures for p in points.get(self._log.name, ())):
            self._search()  # a tracker's file that was begun a moment ago
            points = {name: [*points.get(name, ()), *some] for name, some in self._read_all().items()}
        if any(points.values()) and self._writes_events():  # written between the two reads
            return []
        self.source = self._choose(points)
        found = points.get(self.source, []) if self.source else []
        if self.source != self._log.name:
            return [point for point in found if not self._is_told(point)]
        for point in found:
            for name in self._told.keys() & point.figures:
                self._told[name].add(point.step)
        return found

    def _read_all(self, *, last: bool = False) -> dict[str, list[Point]]:
        points: dict[str, list[Point]] = {}
        guessed = self.source == self._log.name and self._log.dicts
        for reader in self._readers.values():
            if guessed or self.source in (None, reader.name):
                points.setdefault(reader.name, []).extend(reader.read())
        if last and self._log.name in points:
            points[self._log.name] += self._log.end()
        return points

    def _choose(self, points: Mapping[str, Sequence[Point]]) -> str | None:
        having = [name for name, some in points.items() if any("loss" in point.figures for point in some)]
        if self.source not in (None, self._log.name) or not self._log.dicts:
            return self.source or next(iter(having), None)
        for name in having:
            if name not in (self._log.name, TrainerState.name):
                return name
        if TrainerState.name in having and self._is_wrong(points[TrainerState.name]):
            return TrainerState.name
        return self.source or next(iter(having), None)

    def _is_wrong(self, truth: Sequence[Point]) -> bool:
        """Whether a step was read from the log that the Trainer's state does not have."""
        true = {point.step for point in truth if "loss" in point.figures}
        return any(min(true) <= step <= max(true) for step in self._told["loss"] - true)

    def _is_told(self, point: Point) -> bool:
        """Whether the log was read as far as this step, before another place took precedence."""
        kinds = self._told.keys() & point.figures or {"loss"}
        return all(point.step <= max(self._told[kind], default=-1) for kind in kinds)

    def _writes_events(self) -> bool:
        while not self._own and (data := self._events.read()[0]):
            self._own = any(b'"STEP"' in line and READ_FROM.encode() not in line for line in data.split(b"\n"))
        return self._own

    def _search(self) -> None:
        self._searched = time.monotonic()
        for folder in self._folders:
            for path, make in _find(folder, self._floor):
                if len(self._readers) >= _FILES:
                    return
                if path not in self._readers:
                    self._readers[path] = make(path)


def _find(folder: Path, floor: dict[str, int]) -> Iterator[tuple[Path, Callable[[Path], Reader]]]:
    kinds: list[tuple[str, Callable[[Path], Reader]]] = [
        (TENSORBOARD, EventFile),
        (WANDB, OfflineRun),
        (TrainerState.PATTERN, lambda path: TrainerState(path, floor)),
        (LightningTable.PATTERN, LightningTable),
        (MlflowDatabase.PATTERN, MlflowDatabase),
    ]
    seen = 0
    for above, folders, files in os.walk(folder):
        here = Path(above)
        deep = len(here.parts) - len(folder.parts) >= _DEPTH
        folders[:] = [] if deep else sorted(name for name in folders if name not in _PASSED)
        for name in sorted(files):
            seen += 1
            if here.name == MlflowMetric.PATTERN:
                yield here / name, MlflowMetric
            for pattern, make in kinds:
                if fnmatch.fnmatchcase(name, pattern):
                    yield here / name, make
        if seen > _ENTRIES:
            return
