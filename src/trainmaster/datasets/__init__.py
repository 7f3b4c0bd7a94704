"""Where samples come from. One file per source; the folder is the registry, and this is the contract.

A source is a function of (seed, index): sample `index` is the same on every rank of every world size, for ever. Ranks
need not talk to share the data: one global cursor numbers the samples, and each rank takes its own slice.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol

import torch
from torch import Tensor

from trainmaster.core.errors import UsageError
from trainmaster.core.train_config import DataConfig


class Source(Protocol):
    """An endless row of numbered samples, and another of held-out ones that share no text with the first."""

    @property
    def vocab(self) -> int:
        """Every token is below this."""
        ...

    def sample(self, index: int, *, tokens: int, held_out: bool) -> bytes | list[int]:
        """Exactly `tokens` tokens of sample `index`. Pure: the same answer whenever and wherever it is asked."""
        ...


def names() -> list[str]:
    """Every source there is: the modules of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def load(config: DataConfig) -> Source:
    """The source a config names, with its seed."""
    if config.source not in names():
        raise UsageError(f"data.source: {config.source!r} is not one of {', '.join(names())}")
    source: Source = importlib.import_module(f"{__name__}.{config.source}").create(config)
    return source


def batch(source: Source, first: int, count: int, *, sequence_tokens: int, held_out: bool = False) -> Tensor:
    """Samples `first` to `first + count - 1` as rows of sequence_tokens + 1: inputs, and targets one place on."""
    rows = [
        torch.tensor(list(source.sample(index, tokens=sequence_tokens + 1, held_out=held_out)), dtype=torch.long)
        for index in range(first, first + count)
    ]
    return torch.stack(rows)
