"""Tokenise raw files into a folder, in many processes; a killed run continues where it stopped. No torch here.

The work is cut into shards beforehand, from the files' names and sizes alone. A process reads, tokenises and writes one
shard after another; a shard's record is written last of its files, so what a record names is whole. The index follows
when all records are there.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO

from trainmaster.core import schema
from trainmaster.core.errors import DataError, UsageError
from trainmaster.core.files import DRAFT_PREFIX
from trainmaster.datasets.corpus import files as _files
from trainmaster.datasets.corpus import index as _index
from trainmaster.datasets.corpus import tokenizer as _tokenizer
from trainmaster.datasets.corpus.files import Block, Document, TextLocation
from trainmaster.datasets.corpus.index import SPLITS, File, Index, Shard, TokenizerRecord

WORK = "work.json"  # what is being made; gone when the index is there
SHARD_BYTES = 256 << 20  # of raw input: about 60 million tokens of English
_AT_ONCE = 64  # documents given to the tokenizer together
_FLUSH_BYTES = 4 << 20
_CODES = {"uint16": "H", "uint32": "I"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings of the tokenisation. Together with the files they determine every byte of the result."""

    tokenizer: str = "bytes"
    end_token: str | None = None
    manner: TextLocation = TextLocation()  # the name is part of the digest of prepared data
    held_out_share: float = 0.005
    skip_unreadable: bool = False
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One shard to make: these blocks, in this order."""

    number: int
    format: str
    blocks: tuple[Block, ...]

    @property
    def size_bytes(self) -> int:
        return sum(block.size_bytes for block in self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A finished shard."""

    number: int
    train: Shard | None
    held_out: Shard | None
    empty: int
    skipped: int


def plan(files: Sequence[Path], recipe: Recipe) -> list[Job]:
    """The shards to make; deterministic, so that a killed run can continue."""
    jobs: list[Job] = []
    for path in files:
        form = _files.guess(path) or "text"
        blocks: list[Block] = []
        for block in _files.format_of(form).cut(path, recipe.manner):
            blocks.append(block)
            if sum(item.size_bytes for item in blocks) >= recipe.shard_bytes:
                jobs.append(Job(number=len(jobs), format=form, blocks=tuple(blocks)))
                blocks = []
        if blocks:
            jobs.append(Job(number=len(jobs), format=form, blocks=tuple(blocks)))
    return _joined(jobs, recipe.shard_bytes)


def prepare(
    files: Sequence[Path],
    out: Path,
    recipe: Recipe,
    *,
    processes: int,
    source: Mapping[str, Any],
    stamps: Sequence[str],
    advance: Callable[[int], None] = lambda _: None,
) -> Index:
    """Make the folder or continue it, and return its index. `advance` is called with the input bytes done.

    `stamps` identify the content of each file: a continued run must not mix shards of two versions.
    """
    tokenizer = _load_tokenizer(recipe.tokenizer, recipe.end_token)  # a wrong name fails before the work
    jobs = plan(files, recipe)
    digest = _digest([path.name for path in files], list(stamps), schema.to_plain(recipe), tokenizer.sha256)
    if (out / _index.INDEX).exists():
        index = _index.read(out)
        _must_be(out, index.source.get("work"), digest)
        advance(sum(job.size_bytes for job in jobs))
        return index
    _begin(out, digest)
    done = {job.number: record for job in jobs if (record := _finished(out, job)) is not None}
    advance(sum(job.size_bytes for job in jobs if job.number in done))
    for record in _make([job for job in jobs if job.number not in done], out, recipe, processes):
        done[record.number] = record
        advance(jobs[record.number].size_bytes)
    records = [done[job.number] for job in jobs]
    index = Index(
        dtype=_dtype(tokenizer.vocab),
        tokenizer=TokenizerRecord(
            name=tokenizer.name, vocab=tokenizer.vocab, end=tokenizer.end, sha256=tokenizer.sha256
        ),
        train=tuple(record.train for record in records if record.train is not None),
        held_out=tuple(record.held_out for record in records if record.held_out is not None),
        empty=sum(record.empty for record in records),
        skipped=sum(record.skipped for record in records),
        source={**source, "held_out_share": recipe.held_out_share, "work": digest},
    )
    _index.write(out, index)
    _clear(out)
    return index


def is_held_out(text: str, share: float) -> bool:
    """Whether a document is held out: decided by its content, so that two copies are never separated."""
    if share == 0:
        return False
    digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def make_shard(job: Job, out: Path, recipe: Recipe) -> Record:
    """Read, tokenise and write one shard; its record comes last."""
    tokenizer = _load_tokenizer(recipe.tokenizer, recipe.end_token)
    writers = {split: _Writer(out / f"{split}-{job.number:05d}", _dtype(tokenizer.vocab)) for split in SPLITS}
    empty = skipped = 0
    for some in _batched(_read(job, recipe)):
        good = [document for document in some if document.fault is None and document.text.strip()]
        skipped += sum(document.fault is not None for document in some)
        empty += sum(document.fault is None and not document.text.strip() for document in some)
        for document, tokens in zip(good, tokenizer.encode_many([item.text for item in good]), strict=True):
            held_out = is_held_out(document.text, recipe.held_out_share)
            writers["held_out" if held_out else "train"].add(tokens, tokenizer.end)
    shards = {split: writer.close() for split, writer in writers.items()}
    record = Record(number=job.number, train=shards["train"], held_out=shards["held_out"], empty=empty, skipped=skipped)
    _index.write_json(_record_path(out, job.number), schema.to_plain(record))
    return record


class _Writer:
    """Writer of a shard's two files; hashes them while writing."""

    def __init__(self, stem: Path, dtype: str) -> None:
        self._stem, self._code = stem, _CODES[dtype]
        self._files: dict[str, BinaryIO] = {}
        self._hashes = {kind: hashlib.sha256() for kind in ("tokens", "lengths")}
        self._sizes = {"tokens": 0, "lengths": 0}
        self._tokens, self._lengths = bytearray(), bytearray()
        self._count = self._documents = self._longest = self._max = 0

    def add(self, tokens: list[int], end: int) -> None:
        tokens.append(end)
        highest = max(tokens)
        self._max = max(self._max, highest)
        # struct, because array reads its numbers one by one through an argument parser.
        self._tokens += struct.pack(f"<{len(tokens)}{self._code}", *tokens)
        self._lengths += struct.pack("<I", len(tokens))
        self._count += len(tokens)
        self._documents += 1
        self._longest = max(self._longest, len(tokens))
        if len(self._tokens) >= _FLUSH_BYTES:
            self._flush()

    def close(self) -> Shard | None:
        """The shard, named and synced; None where nothing was added."""
        if not self._documents:
            return None
        self._flush()
        files = {}
        for kind, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            path = self._stem.with_suffix(f".{kind}")
            path.with_name(path.name + ".part").replace(path)
            files[kind] = File(name=path.name, size_bytes=self._sizes[kind], sha256=self._hashes[kind].hexdigest())
        return Shard(
            tokens_file=files["tokens"],
            lengths_file=files["lengths"],
            tokens=self._count,
            documents=self._documents,
            longest=self._longest,
            max_token=self._max,
        )

    def _flush(self) -> None:
        for kind, values in (("tokens", self._tokens), ("lengths", self._lengths)):
            if kind not in self._files:
                self._files[kind] = self._stem.with_suffix(f".{kind}.part").open("wb")
            self._files[kind].write(values)
            self._hashes[kind].update(values)
            self._sizes[kind] += len(values)
            values.clear()


def _make(jobs: Sequence[Job], out: Path, recipe: Recipe, processes: int) -> Iterator[Record]:
    if processes == 1 or len(jobs) < 2:
        for job in jobs:
            yield make_shard(job, out, recipe)
        return
    # Spawned, not forked: the caller may have threads, and a fork would copy locks that are never released.
    pool = ProcessPoolExecutor(min(processes, len(jobs)), get_context("spawn"), _tokenizer.keep_threads_apart)
    try:
        for future in as_completed([pool.submit(make_shard, job, out, recipe) for job in jobs]):
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _read(job: Job, recipe: Recipe) -> Iterator[Document]:
    form = _files.format_of(job.format)
    for block in job.blocks:
        for document in form.documents(block, recipe.manner):
            if document.fault is not None and not recipe.skip_unreadable:
                raise DataError(
                    f"{document.where}: {document.fault}; mend it, or leave such documents out with "
                    "`trainmaster data prepare --skip-unreadable`"
                )
            yield document


def _batched(documents: Iterator[Document]) -> Iterator[list[Document]]:
    while some := list(itertools.islice(documents, _AT_ONCE)):
        yield some


def _joined(jobs: list[Job], size_bytes: int) -> list[Job]:
    """Group small files into one shard: a million small shards would be as slow to read as the files."""
    joined: list[Job] = []
    for job in jobs:
        last = joined[-1] if joined else None
        if last is not None and last.format == job.format and last.size_bytes + job.size_bytes <= size_bytes:
            joined[-1] = replace(last, blocks=last.blocks + job.blocks)
        else:
            joined.append(replace(job, number=len(joined)))
    return joined


def _digest(*what: object) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _begin(out: Path, digest: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    try:
        begun = json.loads((out / WORK).read_bytes()).get("work")
    except FileNotFoundError:
        if any(out.iterdir()):
            raise UsageError(f"{out} is not empty and holds no prepared data; choose another folder") from None
        _index.write_json(out / WORK, {"work": digest})
        return
    except ValueError:
        begun = None
    _must_be(out, begun, digest)


def _must_be(out: Path, begun: object, digest: str) -> None:
    if begun != digest:
        raise UsageError(
            f"{out} was prepared from other files or with other settings; choose another folder, or remove it first"
        )


def _finished(out: Path, job: Job) -> Record | None:
    """Result of an earlier run for this job, if complete."""
    try:
        record = schema.build(Record, json.loads(_record_path(out, job.number).read_bytes()))
    except (OSError, ValueError, UsageError):
        return None
    for shard in (record.train, record.held_out):
        for file in (shard.tokens_file, shard.lengths_file) if shard is not None else ():
            path = out / file.name
            if not path.exists() or path.stat().st_size != file.size_bytes:
                return None
    return record


def _record_path(out: Path, number: int) -> Path:
    return out / f"shard-{number:05d}.json"


def _clear(out: Path) -> None:
    for path in [*out.glob("shard-*.json"), *out.glob("*.part"), *out.glob(f"{DRAFT_PREFIX}*"), out / WORK]:
        path.unlink(missing_ok=True)


def _dtype(vocab: int) -> Any:
    return "uint16" if vocab <= 1 << 16 else "uint32"


@functools.lru_cache(maxsize=1)
def _load_tokenizer(name: str, end_token: str | None) -> _tokenizer.Tokenizer:
    return _tokenizer.load(name, end_token=end_token)
