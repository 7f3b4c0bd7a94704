"""Packing: rows of equal length, cut from one stream (concat) or packed from whole documents.

A packed row holds pairs of a token and the one that follows it in its document; a document's last token is a target
only. Over all rows every pair of every document comes exactly once. A document longer than a row fills rows of its own,
and its rest is packed with others. Documents are packed in their order, a new row where the next does not fit: on which
row a document lies is then found by one pass over lengths, at one step for each row.
"""

from __future__ import annotations

import bisect
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from trainmaster.datasets import NOT_COUNTED, Rows, whole
from trainmaster.datasets.corpus.index import Shard
from trainmaster.datasets.corpus.tokens import Tokens, read_lengths


class Cut(Protocol):
    """Rows of one split, numbered."""

    def __len__(self) -> int: ...

    def row(self, number: int) -> Rows: ...

    @property
    def fill(self) -> float:
        """Share of all positions that hold a counted token."""


class Concat:
    """Rows cut from the whole stream one after another; an incomplete row at the end is dropped."""

    fill = 1.0

    def __init__(self, tokens: Tokens, *, sequence_tokens: int) -> None:
        self._tokens, self._length = tokens, sequence_tokens

    def __len__(self) -> int:
        return max(0, len(self._tokens) - 1) // self._length

    def row(self, number: int) -> Rows:
        return whole(self._tokens.read(number * self._length, self._length + 1))


class Packed:
    """Rows of whole documents."""

    def __init__(self, folder: Path, shards: tuple[Shard, ...], tokens: Tokens, *, sequence_tokens: int) -> None:
        self._tokens, self._length = tokens, sequence_tokens
        self._shards = [
            _PackedShard(read_lengths(folder, shard), start, sequence_tokens)
            for shard, start in zip(shards, tokens.starts, strict=False)
        ]
        self._ends: list[int] = []
        for shard in self._shards:
            self._ends.append((self._ends[-1] if self._ends else 0) + shard.rows)
        self._pairs = sum(shard.pairs for shard in self._shards)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def fill(self) -> float:
        return self._pairs / (len(self) * self._length) if len(self) else 0.0

    def row(self, number: int) -> Rows:
        shard = bisect.bisect_right(self._ends, number)
        pieces = self._shards[shard].pieces(number - (self._ends[shard - 1] if shard else 0))
        return fill_row([self._tokens.read(first, pairs + 1) for first, pairs in pieces], self._length)


class _PackedShard:
    def __init__(self, lengths: Tensor, first: int, length: int) -> None:
        """`first` is the number of the shard's first token, `length` that of a row."""
        pairs = (lengths - 1).clamp(min=0)
        self._length = length
        self._starts = first + torch.cumsum(lengths, 0) - lengths  # 8 bytes a document: what packing costs in memory
        self._lengths = lengths.to(torch.int32)
        full = torch.div(pairs, length, rounding_mode="floor")
        long = torch.nonzero(full).flatten()
        # Rows that one long document fills: which document, and its how many-th such row.
        self._long = torch.repeat_interleave(long, full[long])
        before = torch.cumsum(full[long], 0) - full[long]
        self._turn = torch.arange(len(self._long)) - torch.repeat_interleave(before, full[long])
        self._first = _next_fit(pairs % length, length)  # the first document of each packed row, and the end
        self.rows = len(self._long) + len(self._first) - 1
        self.pairs = int(pairs.sum())

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """Start and pair count of each piece of a row."""
        if row < len(self._long):
            return [(int(self._starts[self._long[row]]) + int(self._turn[row]) * self._length, self._length)]
        packed = row - len(self._long)
        span = slice(self._first[packed], self._first[packed + 1])
        pieces = []
        for start, length in zip(self._starts[span].tolist(), self._lengths[span].tolist(), strict=True):
            rows, rest = divmod(max(0, length - 1), self._length)
            if rest:
                pieces.append((start + rows * self._length, rest))
        return pieces


def _next_fit(rests: Tensor, length: int) -> list[int]:
    """First document of each row, and the end of the last; no row is empty."""
    ends = torch.cumsum(rests, 0).tolist()
    if not ends or ends[-1] == 0:
        return [0]
    firsts, used = [0], 0
    while True:
        # As many documents as fit behind `used` pairs.
        upto = bisect.bisect_right(ends, used + length)
        firsts.append(upto)
        used = ends[upto - 1]
        if used == ends[-1]:
            firsts[-1] = len(ends)
            return firsts


def fill_row(pieces: list[Tensor], length: int) -> Rows:
    """One row from pieces of documents; the rest is padding, numbered as a document of its own."""
    tokens = torch.zeros(length, dtype=torch.int64)
    targets = torch.full((length,), NOT_COUNTED, dtype=torch.int64)
    documents = torch.full((length,), len(pieces), dtype=torch.int32)
    at = 0
    for number, piece in enumerate(pieces):
        end = at + len(piece) - 1
        tokens[at:end], targets[at:end], documents[at:end] = piece[:-1], piece[1:], number
        at = end
    return Rows(tokens=tokens[None], targets=targets[None], documents=documents[None])
