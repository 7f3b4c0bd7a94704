"""Data sources. One file per source; the folder is the registry, and this module is the contract.

Samples are numbered over all ranks: sample `n` is the same on every rank of every world size, so ranks share the data
without communication. Most sources compute a sample from its number. A stream cannot; it is read in shards, and the
position of each shard is its state (`_stream_shards.py`). Modules whose name begins with an underscore, and the package
`corpus`, are no sources.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainmaster.core.config.data import DataConfig
from trainmaster.core.errors import UsageError

if TYPE_CHECKING:  # inside functions otherwise: data is also prepared where there is no torch
    from torch import Tensor

NOT_COUNTED = -100  # target without a loss; the ignore_index of torch's cross entropy


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Shape of the samples that a run needs."""

    sequence_tokens: int
    batch_sequences: int  # over all ranks: row j of every batch is sample j modulo this


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Samples on the CPU. Each token's target is the token that follows it, or NOT_COUNTED."""

    tokens: Tensor  # (rows, sequence_tokens), int64
    targets: Tensor  # the same
    documents: Tensor | None = None  # int32: which document of its row a token belongs to; None: one document a row


class Source:
    """Endless numbered samples, and held-out samples that share no document with them."""

    vocab: int  # every token is below this
    tokenizer: str  # the hash of what made its tokens
    fingerprint: str  # of the data itself: equal on every node, and when a run is resumed
    held_out_rows: int | None = None  # number of held-out rows; None: unlimited
    summary: str = ""  # one line for the log
    is_stream: bool = False  # whether it has a state
    trouble: str | None = None  # the failure being retried, for messages

    def row(self, number: int, *, held_out: bool) -> Rows:
        """Sample `number` as one row. The same on every rank and in every run."""
        raise NotImplementedError

    def rows(self, numbers: Sequence[int], *, held_out: bool = False) -> Rows:
        """These samples, in this order."""
        return stack(self.row(number, held_out=held_out) for number in numbers)

    # The rest is for streams. A source that computes samples from their numbers has no state.

    def state(self, upcoming: Sequence[int]) -> Mapping[str, Any]:  # noqa: ARG002
        """This rank's part of the stream's position, where upcoming[j] is the next sample of row j."""
        return {}

    def join(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:  # noqa: ARG002
        """Merge the states of all ranks into one, ready for JSON."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a merged state, on any rank."""

    def forget(self, upcoming: Sequence[int]) -> None:
        """Release samples before these: they are read again only after a restore."""

    def close(self) -> None:
        """Close files and connections."""


def names() -> list[str]:
    """Names of all sources: the modules of this folder."""
    modules = pkgutil.iter_modules(__path__)
    return sorted(module.name for module in modules if not module.ispkg and not module.name.startswith("_"))


def load(config: DataConfig, shape: Shape) -> Source:
    """Open the source that a config names. Raw files are tokenised here, which can take long."""
    if config.source not in names():
        raise UsageError(f"data.source: {config.source!r} is not one of {', '.join(names())}")
    source: Source = importlib.import_module(f"{__name__}.{config.source}").create(config, shape)
    return source


def stack(rows: Iterable[Rows]) -> Rows:
    """Concatenate rows into one batch. A row without document numbers is one document."""
    import torch

    parts = list(rows)
    if all(row.documents is None for row in parts):
        documents = None
    else:
        documents = torch.cat(
            [
                torch.zeros_like(row.tokens, dtype=torch.int32) if row.documents is None else row.documents
                for row in parts
            ]
        )
    tokens, targets = (torch.cat([getattr(row, name) for row in parts]) for name in ("tokens", "targets"))
    return Rows(tokens=tokens, targets=targets, documents=documents)


def whole(tokens: Tensor) -> Rows:
    """One row from sequence_tokens + 1 consecutive tokens: each is the target of the one before it."""
    return Rows(tokens=tokens[None, :-1], targets=tokens[None, 1:])
