"""Figures in tables that trackers keep: the Trainer's state, Lightning's CSV, MLflow's files and database."""

from __future__ import annotations

import contextlib
import csv
import json
import stat
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from trainmaster.node.curves import AT_ONCE, Point, Tail, canonical, to_number, to_step

_AT_ONCE_ROWS = 20_000


class TrainerState:
    """`trainer_state.json` of Hugging Face's Trainer, in every `checkpoint-N`. Each holds the history of all before it:
    `floor` is shared, and a step that an earlier file had told is not told again."""

    name, PATTERN = "trainer_state", "trainer_state.json"

    def __init__(self, path: Path, floor: dict[str, int]) -> None:
        self._path, self._known, self._floor = path, (0.0, 0), floor

    def read(self) -> list[Point]:
        with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError):
            facts = self._path.lstat()
            version = (facts.st_mtime, facts.st_size)
            if not stat.S_ISREG(facts.st_mode) or version == self._known or facts.st_size > AT_ONCE:
                return []
            rows = json.loads(self._path.read_bytes()).get("log_history")
            self._known = version
            points = [_row(row) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
            new = [point for point in points if point is not None and point.step > self._floor.get(self.name, -1)]
            self._floor[self.name] = max((point.step for point in new), default=self._floor.get(self.name, -1))
            return new
        return []


class LightningTable:
    """`metrics.csv` of Lightning's CSVLogger."""

    name, PATTERN = "lightning", "metrics.csv"

    def __init__(self, path: Path) -> None:
        self._tail, self._held, self._head = Tail(path), "", [""]

    def read(self) -> list[Point]:
        data, anew = self._tail.read()
        if anew:  # a new column: the file is written again from its beginning
            self._held, self._head = "", [""]
        *lines, self._held = (self._held + data.decode(errors="replace")).split("\n")
        points = []
        try:
            for row in csv.reader(lines):
                if "step" in row:
                    self._head = row
                elif (point := _row(dict(zip(self._head, row, strict=False)))) is not None:
                    points.append(point)
        except csv.Error:
            return points
        return points


class MlflowMetric:
    """One file of MLflow's file store, `metrics/NAME`: a line is a time, a value and a step."""

    name, PATTERN = "mlflow", "metrics"

    def __init__(self, path: Path) -> None:
        self._figure, self._tail, self._held = canonical(path.name), Tail(path), b""

    def read(self) -> list[Point]:
        if self._figure is None:
            return []
        *lines, self._held = (self._held + self._tail.read()[0]).split(b"\n")
        points = []
        for line in lines:
            words = line[:200].decode(errors="replace").split()
            if len(words) == 3 and words[2].isdecimal() and (value := to_number(words[1])) is not None:
                points.append(Point(step=int(words[2]), figures={self._figure: value}))
        return points


class MlflowDatabase:
    """MLflow's SQLite store, table `metrics`."""

    name, PATTERN = "mlflow", "mlflow.db"

    def __init__(self, path: Path) -> None:
        self._path, self._row = path, 0

    def read(self) -> list[Point]:
        if self._path.is_symlink() or not self._path.is_file():
            return []
        try:
            import sqlite3  # not every Python of a node was built with it
        except ImportError:
            return []
        points = []
        query = "SELECT rowid, key, value, step, is_nan FROM metrics WHERE rowid > ? ORDER BY rowid LIMIT ?"
        with contextlib.suppress(sqlite3.Error, ValueError):
            db = sqlite3.connect(f"file:{quote(str(self._path))}?mode=ro", uri=True, timeout=0.2)
            try:
                for row, key, value, step, is_nan in db.execute(query, (self._row, _AT_ONCE_ROWS)):
                    self._row = row
                    name, at = canonical(str(key)), to_step(step)
                    number = float("nan") if is_nan else to_number(value)
                    if name is not None and at is not None and number is not None:
                        points.append(Point(step=at, figures={name: number}))
            finally:
                db.close()
        return points


def _row(row: Mapping[str, object]) -> Point | None:
    if "train_runtime" in row:  # the Trainer's last row: means over the whole training
        return None
    step = to_step(to_number(row.get("step")))
    figures = {}
    for name, value in row.items():
        ours = canonical(str(name))
        if ours is not None and value not in ("", None) and (number := to_number(value)) is not None:
            figures[ours] = number
    return Point(step=step, figures=figures) if step is not None and figures else None
