"""Validation of raw files or a prepared folder: counts, lengths, duplicates, and every fault by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainmaster.core.errors import DataError, TrainmasterError
from trainmaster.datasets.corpus import files as _files
from trainmaster.datasets.corpus import index as _index
from trainmaster.datasets.corpus import tokenizer as _tokenizer
from trainmaster.datasets.corpus.index import LENGTH_BYTES, SPLITS, WIDTHS, Index, Shard
from trainmaster.datasets.corpus.prepare import Recipe

_CODES: dict[str, Literal["H", "I"]] = {"uint16": "H", "uint32": "I"}
_SHOWN = 20  # faults of one kind that are named; the rest are counted
_SAMPLE_CHARACTERS = 300
# A vocabulary is padded to a round number, for speed. Published models pad by less than a tenth; more is a mistake.
_PADDING, _PADDING_TOKENS = 1.25, 1024

Advance = Callable[[int], None]


@dataclass(kw_only=True)
class Report:
    """Result of a validation. `damage` would stop training; the rest is for a person to judge."""

    kind: str
    documents: int = 0
    tokens: int = 0
    held_out_documents: int = 0
    held_out_tokens: int = 0
    empty: int = 0
    duplicates: int = 0
    shared: int = 0  # held-out documents that are trained on too
    shortest: int | None = None
    longest: int | None = None
    max_token: int | None = None
    vocab: int | None = None
    tokenizer: str = ""
    damage: list[str] = field(default_factory=list)
    damaged: int = 0
    samples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.damaged

    def add_damage(self, text: str) -> None:
        self.damaged += 1
        if len(self.damage) < _SHOWN:
            self.damage.append(text)

    def length(self, tokens: int) -> None:
        self.shortest = tokens if self.shortest is None else min(self.shortest, tokens)
        self.longest = max(self.longest or 0, tokens)


def is_prepared(path: Path) -> bool:
    return path.is_dir() and ((path / _index.INDEX).exists() or (path / "work.json").exists())


def validate_prepared(
    folder: Path, *, model_vocab: int | None, samples: int, advance: Advance = lambda _: None
) -> Report:
    """Read every byte of a prepared folder against its index."""
    report = Report(kind="prepared")
    try:
        index = _index.read(folder)
    except DataError as error:
        report.add_damage(str(error))
        return report
    report.tokenizer, report.vocab = index.tokenizer.name, index.tokenizer.vocab
    _judge_vocab(report, index.tokenizer.vocab, model_vocab)
    report.empty = index.empty
    seen: dict[str, set[bytes]] = {split: set() for split in SPLITS}
    for split in SPLITS:
        for shard in index.shards(split):
            try:
                _shard(folder, index, shard, split=split, report=report, seen=seen)
            except (OSError, DataError) as error:
                report.add_damage(f"{shard.tokens_file.name}: {error}")
            advance(shard.tokens_file.size_bytes)
    report.shared = len(seen["train"] & seen["held_out"])
    if report.shared:
        report.add_damage(f"{report.shared} held-out documents are trained on too")
    report.samples = list(_samples(folder, index, samples))
    return report


def validate_files(
    files: Sequence[Path], recipe: Recipe, *, model_vocab: int | None, samples: int, advance: Advance = lambda _: None
) -> Report:
    """Read and tokenise raw files without writing anything."""
    report = Report(kind="files")
    tokenizer = _tokenizer.load(recipe.tokenizer, end_token=recipe.end_token)
    report.tokenizer, report.vocab = tokenizer.name, tokenizer.vocab
    _judge_vocab(report, tokenizer.vocab, model_vocab)
    seen: set[bytes] = set()
    for path in files:
        form = _files.format_of(_files.guess(path) or "text")
        try:
            for block in form.cut(path, recipe.manner):
                for document in form.documents(block, recipe.manner):
                    if document.fault is not None:
                        report.add_damage(f"{document.where}: {document.fault}")
                        continue
                    if not document.text.strip():
                        report.empty += 1
                        continue
                    (tokens,) = tokenizer.encode_many([document.text])
                    _count(report, tokens, _hash(document.text.encode("utf-8", "replace")), seen)
                    if len(report.samples) < samples:
                        text = document.text[:_SAMPLE_CHARACTERS]
                        report.samples.append({"where": document.where, "tokens": len(tokens) + 1, "text": text})
                advance(block.size_bytes)
        except (OSError, TrainmasterError) as error:
            report.add_damage(str(error))
    return report


def _judge_vocab(report: Report, tokens: int, model_vocab: int | None) -> None:
    if model_vocab is None:
        return
    if tokens > model_vocab:
        report.add_damage(f"model.vocab {model_vocab:,} is less than the {tokens:,} tokens of the tokenizer")
    elif model_vocab > max(tokens * _PADDING, tokens + _PADDING_TOKENS):
        report.add_damage(
            f"model.vocab {model_vocab:,} is made for another tokenizer than {report.tokenizer}, which has {tokens:,} "
            "tokens: the rest would never be trained; prepare the data with the model's own, --tokenizer tokenizer.json"
        )


def _shard(
    folder: Path, index: Index, shard: Shard, *, split: str, report: Report, seen: dict[str, set[bytes]]
) -> None:
    width = WIDTHS[index.dtype]
    for file, size in ((shard.tokens_file, shard.tokens * width), (shard.lengths_file, shard.documents * LENGTH_BYTES)):
        fault = _index.file_fault(folder / file.name, file, deep=True)
        if fault is None and file.size_bytes != size:
            fault = f"has {file.size_bytes} bytes, and the index counts {size}"
        if fault is not None:
            report.add_damage(f"{file.name} {fault}")
            return
    lengths = memoryview((folder / shard.lengths_file.name).read_bytes()).cast("I").tolist()
    if sum(lengths) != shard.tokens:
        report.add_damage(
            f"{shard.lengths_file.name}: its documents have {sum(lengths)} tokens, the shard {shard.tokens}"
        )
        return
    tokens = memoryview((folder / shard.tokens_file.name).read_bytes()).cast(_CODES[index.dtype])
    highest = max(tokens, default=0)
    report.max_token = max(report.max_token or 0, highest)
    if highest >= index.tokenizer.vocab:
        report.add_damage(
            f"{shard.tokens_file.name}: token {highest} is not below the vocabulary {index.tokenizer.vocab}"
        )
    at = bare = 0
    for length in lengths:
        document = tokens[at : at + length]
        at += length
        bare += not length or document[-1] != index.tokenizer.end
        report.length(length)
        mark = _hash(document.tobytes())
        report.duplicates += mark in seen[split]
        seen[split].add(mark)
    if bare:
        report.add_damage(
            f"{shard.lengths_file.name}: {bare} documents do not end with the token {index.tokenizer.end}"
        )
    if split == "train":
        report.documents, report.tokens = report.documents + len(lengths), report.tokens + shard.tokens
    else:
        report.held_out_documents += len(lengths)
        report.held_out_tokens += shard.tokens


def _count(report: Report, tokens: Sequence[int], mark: bytes, seen: set[bytes]) -> None:
    report.documents += 1
    report.tokens += len(tokens) + 1
    report.length(len(tokens) + 1)
    report.max_token = max(report.max_token or 0, *tokens) if tokens else report.max_token
    report.duplicates += mark in seen
    seen.add(mark)


def _samples(folder: Path, index: Index, count: int) -> Iterator[dict[str, Any]]:
    """The first documents of evenly spread shards, as text where the tokenizer is at hand."""
    decode = _decoder(index)
    width, shards = WIDTHS[index.dtype], index.train
    for shard in shards[:: max(1, len(shards) // max(1, count))][:count]:
        try:
            with (folder / shard.lengths_file.name).open("rb") as file:
                length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            with (folder / shard.tokens_file.name).open("rb") as file:
                raw = file.read(min(length, _SAMPLE_CHARACTERS) * width)
            tokens = memoryview(raw[: len(raw) // width * width]).cast(_CODES[index.dtype]).tolist()
            yield {"where": shard.tokens_file.name, "tokens": length, "text": decode(tokens)[:_SAMPLE_CHARACTERS]}
        except (OSError, ValueError):
            continue  # named above as damage


def _decoder(index: Index) -> Callable[[list[int]], str]:
    try:
        return _tokenizer.load(index.tokenizer.name).decode
    except TrainmasterError:  # it is not on this machine
        return lambda tokens: " ".join(map(str, tokens))


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=12).digest()
