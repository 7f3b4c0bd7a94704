"""What an attempt shows of a program: its steps and saves, its losses, and how long it takes."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path

from trainmaster.drill import folders
from trainmaster.drill.record import Attempt
from trainmaster.drill.witness_log import Line


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
    """Losses by step, as the agent read them from what the program printed or wrote, and steps that had several."""
    losses: dict[int, float] = {}
    repeated = set[int]()
    try:
        lines = events.read_bytes().splitlines()
    except FileNotFoundError:
        return losses, frozenset()
    for raw in lines:
        try:
            item = json.loads(raw)
            if item["phase"] == "STEP":
                step, loss = int(item["data"]["step"]), float(item["data"]["loss"])
                if repr(losses.setdefault(step, loss)) != repr(loss):  # NaN is not equal to itself
                    repeated.add(step)
                losses[step] = loss
        except (ValueError, KeyError, TypeError):
            continue
    return losses, frozenset(repeated)
