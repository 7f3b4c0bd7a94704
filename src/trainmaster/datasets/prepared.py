"""Tokens made by `trainmaster data prepare`. Needs torch only; works on any number of ranks.

Sample n of pass p is the row at place n of that pass's order: any rank can compute any sample, so nothing is lost or
read twice when the number of ranks changes.
"""

from __future__ import annotations

from pathlib import Path

from trainmaster.core.config.data import DataConfig
from trainmaster.core.errors import DataError
from trainmaster.datasets import Rows, Shape, Source
from trainmaster.datasets._packing import Concat, Cut, Packed
from trainmaster.datasets._shuffle import shuffled
from trainmaster.datasets.corpus import index as _index
from trainmaster.datasets.corpus.index import Index
from trainmaster.datasets.corpus.overlap import find_overlap
from trainmaster.datasets.corpus.tokens import Tokens


class Prepared(Source):
    """The rows of one folder, or of one for training and another for evaluations."""

    def __init__(self, config: DataConfig, shape: Shape, folder: Path, held_out: Path | None) -> None:
        self._seed = config.seed if config.shuffle else None
        self._tokens: list[Tokens] = []
        index = _checked(folder)
        self._folder, self._index = folder, index
        self._evaluated = (folder, index, "held_out")  # documents for evaluations: folder, index, split
        self._train = self._cut(config, shape, folder, index, "train")
        self.vocab, self.fingerprint = index.tokenizer.vocab, index.fingerprint
        self.tokenizer = index.tokenizer.sha256
        if held_out is None:
            self._held_out = self._cut(config, shape, folder, index, "held_out")
        else:
            other = _checked(held_out)
            _must_differ(folder, index, held_out, other)
            self._held_out = self._cut(config, shape, held_out, other, "train")
            self._evaluated = (held_out, other, "train")
            self.fingerprint = f"{self.fingerprint} {other.fingerprint}"
        self.held_out_rows = len(self._held_out)
        if not len(self._train):
            raise DataError(
                f"{folder} holds {index.tokens('train'):,} tokens to train on, not enough for one row of "
                f"{shape.sequence_tokens}; prepare more, or lower sequence_tokens"
            )
        self.summary = (
            f"{folder}: {index.tokens('train'):,} tokens in {index.documents('train'):,} documents, "
            f"{len(self._train):,} rows of {shape.sequence_tokens} a pass ({self._train.fill:.1%} full), "
            f"{self.held_out_rows:,} held out"
        )

    def find_trained_on(self, other: Prepared) -> int | None:
        """Number of a held-out document that the other source trains on, or None."""
        folder, index, split = self._evaluated
        return find_overlap(other._folder, other._index, folder, index, split=split)

    def row(self, number: int, *, held_out: bool) -> Rows:
        if held_out:
            return self._held_out.row(number)
        turn, place = divmod(number, len(self._train))
        if self._seed is not None:
            place = shuffled(place, len(self._train), seed=self._seed, turn=turn)
        return self._train.row(place)

    def close(self) -> None:
        for tokens in self._tokens:
            tokens.close()

    def _cut(self, config: DataConfig, shape: Shape, folder: Path, index: Index, split: str) -> Cut:
        shards = index.shards(split)
        self._tokens.append(Tokens(folder, shards, index.dtype))
        if config.rows == "pack":
            return Packed(folder, shards, self._tokens[-1], sequence_tokens=shape.sequence_tokens)
        return Concat(self._tokens[-1], sequence_tokens=shape.sequence_tokens)


def create(config: DataConfig, shape: Shape) -> Prepared:
    assert config.path is not None
    held_out = Path(config.held_out_path).expanduser() if config.held_out_path is not None else None
    return Prepared(config, shape, Path(config.path).expanduser(), held_out)


def _checked(folder: Path) -> Index:
    """Index of a folder, after comparing file sizes: cheap, and finds a truncated copy."""
    index = _index.read(folder)
    faults = list(_index.find_faults(folder, index, deep=False))
    if faults:
        shown = "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if len(faults) > 3 else "")
        raise DataError(f"{folder}: {shown}; copy it again, and look with `trainmaster data validate {folder}`")
    return index


def _must_differ(folder: Path, index: Index, held_out: Path, other: Index) -> None:
    ours = {shard.tokens_file.sha256 for shard in index.train}
    same = [shard.tokens_file.name for shard in other.train if shard.tokens_file.sha256 in ours]
    if same:
        raise DataError(f"{held_out}: {same[0]} is also in {folder}; held-out documents must not be trained on")
    if index.tokenizer.sha256 != other.tokenizer.sha256:
        raise DataError(
            f"{held_out} was made with tokenizer {other.tokenizer.name}, {folder} with {index.tokenizer.name}; "
            "prepare both with one"
        )
    document = find_overlap(folder, index, held_out, other)
    if document is not None:
        raise DataError(
            f"{held_out}: document {document} is also in {folder}; held-out documents must not be trained on: "
            "remove them from one of the two, or leave held_out_path out and hold out a share"
        )
