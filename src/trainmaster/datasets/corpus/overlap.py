"""Documents that two prepared folders have in common: held-out documents must not be trained on.

Documents are compared by their tokens. Lengths come first: a training document is read only if a held-out one has as
many tokens. Large corpora are sampled, so that opening them stays a matter of seconds; `trainmaster data validate`
compares all held-out documents of one folder with those that the same folder trains on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from trainmaster.datasets.corpus.index import Index
from trainmaster.datasets.corpus.tokens import Tokens, read_lengths

_HELD_OUT = 4096  # held-out documents that are looked for: the longest, whose lengths are rare, and evenly spread ones
_READ = 100_000  # training documents that are read and compared
_SHORTEST = 8  # tokens: a shorter document ("Yes.") may occur anywhere


def find_overlap(folder: Path, index: Index, held_out: Path, other: Index, *, split: str = "train") -> int | None:
    """Number of a document of this split of `held_out` that `folder` trains on too, or None."""
    wanted: dict[tuple[int, bytes], int] = {}
    lengths = torch.cat([torch.empty(0, dtype=torch.int64), *_lengths(held_out, other, split)])
    for number, document in _documents(held_out, other, _chosen(lengths, _HELD_OUT), split):
        wanted[len(document), hashlib.sha256(document).digest()] = number
    if not wanted:
        return None
    ours = torch.cat([torch.empty(0, dtype=torch.int64), *_lengths(folder, index)])
    width = 8  # bytes of a token as it is hashed
    same = torch.isin(ours, torch.tensor(sorted({size // width for size, _ in wanted}))).nonzero().flatten()
    for _, document in _documents(folder, index, _spread(same, _READ).tolist()):
        if (held_out_number := wanted.get((len(document), hashlib.sha256(document).digest()))) is not None:
            return held_out_number
    return None


def _chosen(lengths: torch.Tensor, most: int) -> list[int]:
    numbers = (lengths >= _SHORTEST).nonzero().flatten()
    if len(numbers) <= most:
        return [int(number) for number in numbers]
    longest = numbers[lengths[numbers].topk(most // 2).indices]
    return sorted({*longest.tolist(), *_spread(numbers, most // 2).tolist()})


def _spread(numbers: torch.Tensor, most: int) -> torch.Tensor:
    """At most `most` of these, evenly spread."""
    return numbers if len(numbers) <= most else numbers[torch.arange(most) * len(numbers) // most]


def _lengths(folder: Path, index: Index, split: str = "train") -> list[torch.Tensor]:
    return [read_lengths(folder, shard) for shard in index.shards(split)]


def _documents(folder: Path, index: Index, numbers: Sequence[int], split: str = "train") -> Iterator[tuple[int, bytes]]:
    """These documents of a split, each as the bytes of its tokens."""
    shards = index.shards(split)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), *_lengths(folder, index, split)]).cumsum(0)
    tokens = Tokens(folder, shards, index.dtype)
    try:
        for number in numbers:
            first, end = int(ends[number]), int(ends[number + 1])
            yield number, tokens.read(first, end - first).numpy().tobytes()
    finally:
        tokens.close()
