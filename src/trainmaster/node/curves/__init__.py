"""Step, loss and learning rate of a program that knows nothing of us: read from what it prints and writes anyway.

Each module reads one kind of place, from where it stopped the last time: standard output, TensorBoard's event files,
offline files of Weights & Biases, MLflow's store, the Trainer's `trainer_state.json`, Lightning's `metrics.csv`. All of
it is a stranger's input: sizes are bounded, links are not followed, and what cannot be read gives no point.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

AT_ONCE = 4 << 20  # bytes read from one file in one look
_MOST_STEPS = 1 << 53

# Our name of a figure by the names that programs give it; what is not here is not kept.
_NAMES = {
    "loss": ("loss", "train_loss", "training_loss", "lm_loss", "total_loss", "train_lm_loss", "train_total_loss"),
    "eval_loss": ("eval_loss", "val_loss", "valid_loss", "validation_loss", "test_loss"),
    "lr": ("lr", "learning_rate", "train_lr", "train_learning_rate"),
    "grad_norm": ("grad_norm", "gradient_norm", "gnorm", "train_grad_norm"),
    "tokens_per_s": ("tokens_per_s", "tokens_per_sec", "tokens_per_second", "tok_s", "tok_sec", "tokens_s", "tps"),
}
_OURS = {name: ours for ours, names in _NAMES.items() for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Figures of one step, by our names for them."""

    step: int
    figures: Mapping[str, float]
    at: float | None = field(default=None, compare=False)  # when it was read, in seconds since 1970


class Reader(Protocol):
    """One place that may hold figures."""

    name: str

    def read(self) -> list[Point]:
        """Points that have come since the last call."""


def canonical(name: str) -> str | None:
    """Our name of a figure, or None where it is not one of ours: `train/loss` and `Train Loss` are `loss`."""
    plain = re.sub(r"[^a-z0-9]+", "_", name[:100].lower()).strip("_")
    return _OURS.get(plain) or _OURS.get(re.sub(r"_(?:step|epoch|iter)$", "", plain))


def to_step(value: object) -> int | None:
    """A whole number of steps, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MOST_STEPS:
        return None
    return int(value) if int(value) == value else None


def to_number(value: object) -> float | None:
    """A figure, which may be NaN: a loss that is none is worth a point."""
    if isinstance(value, str):
        value = value[:40].replace(",", "").replace("_", "")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


class Tail:
    """A file that grows, read from where it was left; a file that is replaced or cut is read anew."""

    def __init__(self, path: Path, *, skip: bool = False) -> None:
        self._path, self._skip = path, skip
        self.offset, self._file = 0, (0, 0)

    def read(self) -> tuple[bytes, bool]:
        """What is new, at most AT_ONCE; and whether the file was begun anew.

        With `skip`, of a flood only the end is read.
        """
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return b"", False
        try:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode):
                return b"", False
            file = (facts.st_dev, facts.st_ino)
            anew = facts.st_size < self.offset or (self._file not in ((0, 0), file))
            self._file = file
            if anew:
                self.offset = 0
            if self._skip and facts.st_size - self.offset > AT_ONCE:
                self.offset = facts.st_size - AT_ONCE
            data = os.pread(fd, AT_ONCE, self.offset)
            self.offset += len(data)
            return data, anew
        except OSError:
            return b"", False
        finally:
            os.close(fd)
