"""Index of a folder of prepared tokens, and the checks of its files against it. No torch here.

FOLDER/index.json            written last: a reader that sees it may trust the rest
FOLDER/train-00000.tokens    token after token, uint16 or uint32, little-endian; every document ends with its end
FOLDER/train-00000.lengths   tokens of each document, uint32, its end included
FOLDER/held_out-00000.…      documents kept for evaluations
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainmaster.core import schema
from trainmaster.core.compat import file_digest
from trainmaster.core.errors import DataError, SpecError
from trainmaster.core.files import write_whole

INDEX = "index.json"
SPLITS = ("train", "held_out")
WIDTHS = {"uint16": 2, "uint32": 4}
LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """Expected size and hash of a file."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Some documents of one split."""

    tokens_file: File
    lengths_file: File
    tokens: int
    documents: int
    longest: int  # tokens of its longest document
    max_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerRecord:
    """The tokenizer that made these tokens."""

    name: str
    vocab: int
    end: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The whole folder."""

    dtype: Literal["uint16", "uint32"]
    tokenizer: TokenizerRecord
    train: tuple[Shard, ...]
    held_out: tuple[Shard, ...]
    empty: int  # documents left out because they hold no text
    skipped: int  # documents left out because they could not be read, where that was allowed
    source: Mapping[str, Any]  # what it was made from, and how
    v: int = 1

    def shards(self, split: str) -> tuple[Shard, ...]:
        return self.train if split == "train" else self.held_out

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.shards(split))

    def documents(self, split: str) -> int:
        return sum(shard.documents for shard in self.shards(split))

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the tokens and documents, independent of location and shard size."""
        parts = [f"{self.dtype} {self.tokenizer.end}"]
        for split in SPLITS:
            for shard in self.shards(split):
                parts.append(f"{split} {shard.tokens_file.sha256} {shard.lengths_file.sha256}")
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def write(folder: Path, index: Index) -> None:
    """Commit the folder. Every file that the index names must exist and be synced."""
    plain = schema.to_plain(index)
    write_json(folder / INDEX, {**plain, "digest": _digest(plain)})


def read(folder: Path) -> Index:
    """Index of a folder; DataError with the fault and the remedy."""
    path = folder / INDEX
    try:
        plain = json.loads(path.read_bytes())
        digest = plain.pop("digest")
        index = schema.build(Index, plain)
    except FileNotFoundError:
        hint = "its preparation was cut off: run the same `trainmaster data prepare` again, it goes on"
        missing = hint if folder.is_dir() else "no such folder; make it with `trainmaster data prepare`"
        raise DataError(f"{folder}: {INDEX} is missing; {missing}") from None
    except NotADirectoryError:
        raise DataError(f"{folder} is a file; source prepared reads a folder, raw files have their own") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, SpecError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}); prepare the data again") from None
    if digest != _digest(plain):
        raise DataError(f"{path} does not match its own digest; prepare the data again")
    return index


def find_faults(folder: Path, index: Index, *, deep: bool) -> Iterator[str]:
    """Files that differ from the index. `deep` reads all bytes; otherwise only sizes are compared."""
    for split in SPLITS:
        for shard in index.shards(split):
            for file in (shard.tokens_file, shard.lengths_file):
                fault = file_fault(folder / file.name, file, deep=deep)
                if fault is not None:
                    yield f"{file.name} {fault}"


def write_json(path: Path, value: object) -> None:
    """Write atomically, also in a power cut."""
    write_whole(path, json.dumps(value, indent=1, sort_keys=True) + "\n", durable=True)


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def file_fault(path: Path, file: File, *, deep: bool) -> str | None:
    """Fault of one file, or None."""
    try:
        size = path.stat().st_size
        if size != file.size_bytes:
            return f"has {size} bytes instead of {file.size_bytes}"
        if deep and hash_file(path) != file.sha256:
            return "does not match its SHA-256"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def _digest(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
