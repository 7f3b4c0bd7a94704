"""What an attempt shows of a program: its steps and saves, its losses, and how long it takes."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path

from trainmaster.drill import folders
from trainmaster.drill.printed import NUMBER
from trainmaster.drill.record import Attempt
from trainmaster.drill.witness_log import Line
from trainmaster.node.curves.log_lines import BAR, COLOURS

_MOST_BYTES = 8 << 20  # of a log
_MOST_LINES = 20_000
_LONGEST = 2000  # characters of a line


def lines_by_rank(attempt: Attempt) -> dict[int, dict[int, Line]]:
    """Lines by rank and step of a run that was not disturbed."""
    return {life.rank: dict(enumerate(life.lines, 1)) for life in attempt.lives}


def save_steps(attempt: Attempt, roots: Sequence[Path]) -> tuple[int, ...]:
    """After which steps it saved: as torch.save told, else by the times of the files that are there."""
    heard = {save.after for life in attempt.lives for save in life.saves if save.after}
    if heard or not attempt.lives:
        return tuple(sorted(heard))
    times = [line.at for line in attempt.lives[0].lines]
    found = folders.find_checkpoints(roots, since=attempt.begun)
    return tuple(sorted({sum(at <= checkpoint.at for at in times) for checkpoint in found} - {0}))


def longest_pause(attempt: Attempt) -> float:
    """Seconds between its start and its first step, or between two steps."""
    times = [attempt.begun, *(line.at for life in attempt.lives[:1] for line in life.lines), attempt.ended]
    return max(after - before for before, after in itertools.pairwise(times))


def count_steps(witness: Path) -> int:
    """Steps that the first process has done so far."""
    for path in sorted(witness.glob("*.jsonl")):
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            for raw in reversed(file.read().splitlines()):
                try:
                    return int(json.loads(raw)["n"])
                except (ValueError, KeyError, TypeError):
                    continue
    return 0


def read_losses(events: Path) -> tuple[dict[int, float], frozenset[int]]:
    """Losses by step, as the agent read them from what the program printed or wrote, and steps that had several.

    Without what names an earlier step at the end, as `trained from step 15, final loss 0.17`.
    """
    losses: dict[int, float] = {}
    repeated = set[int]()
    points = _points(events)
    last = points[-1][0] if points else 0
    end = next((at for at in range(len(points), 0, -1) if points[at - 1][0] != last), 0)
    if end and points[end - 1][0] > last:
        points = points[:end]
    for step, loss in points:
        if repr(losses.setdefault(step, loss)) != repr(loss):  # NaN is not equal to itself
            repeated.add(step)
        losses[step] = loss
    return losses, frozenset(repeated)


def _points(events: Path) -> list[tuple[int, float]]:
    points: list[tuple[int, float]] = []
    try:
        lines = events.read_bytes().splitlines()
    except FileNotFoundError:
        return points
    for raw in lines:
        try:
            item = json.loads(raw)
            if item["phase"] == "STEP":
                points.append((int(item["data"]["step"]), float(item["data"]["loss"])))
        except (ValueError, KeyError, TypeError):
            continue
    return points


def read_printed(log: Path, *, ended: bool) -> tuple[str, ...]:
    """The last lines with numbers that a program printed, as a terminal shows them in the end; without progress bars,
    whose lines are a matter of time, and without a last line that a kill cut off. `ended`: by itself."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_BYTES))
            whole = file.read(_MOST_BYTES).split(b"\n")[: None if ended else -1]
    except FileNotFoundError:
        return ()
    shown = (raw.rstrip(b"\r").rsplit(b"\r", 1)[-1][:_LONGEST].decode(errors="replace") for raw in whole)
    lines = (COLOURS.sub("", line) for line in shown)
    return tuple(line for line in lines if NUMBER.search(line) and not _is_bar(line))[-_MOST_LINES:]


def _is_bar(line: str) -> bool:
    return bool(BAR.search(line)) or any(mark in line for mark in "█━╸")
