"""Local files of documents: finding them, cutting them into independent blocks, reading a block.

A format is a source of its own (jsonl.py, parquet.py, text.py) with `SUFFIXES`, `cut(path)` and `documents(block)`.
"""

from __future__ import annotations

import glob
import gzip
import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from trainmaster.core.config.data import RAW
from trainmaster.core.errors import DataError, UsageError

PACKED = (".gz", ".zst")
BLOCK_BYTES = 16 << 20  # what one process reads at a time of a file that can be cut


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLocation:
    """Location of the text in a file."""

    text_field: str = "text"
    text_unit: str = "file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of a file: bytes, or row groups, from `start` up to `end`."""

    path: str
    start: int
    end: int
    size_bytes: int  # for progress, and for shards of even size


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Text of a document, or why it could not be read; `where` names file and line."""

    where: str
    text: str = ""
    fault: str | None = None


class Format(Protocol):
    """Contents of a format's module."""

    SUFFIXES: tuple[str, ...]

    def cut(self, path: Path, location: TextLocation) -> Iterator[Block]: ...

    def documents(self, block: Block, location: TextLocation) -> Iterator[Document]: ...


def format_of(name: str) -> Format:
    return cast(Format, importlib.import_module(f"trainmaster.datasets.{name}"))


def guess(path: str | Path) -> str | None:
    """Format by the file's name, or None."""
    name = Path(path).name.lower()
    for packed in PACKED:
        name = name.removesuffix(packed)
    return next((known for known in RAW if name.endswith(format_of(known).SUFFIXES)), None)


def find(pattern: str, *, wanted: str | None = None) -> list[Path]:
    """The files of a path, a folder or a glob, in the order of their names; at least one."""
    place = Path(pattern).expanduser()
    if place.is_file():
        return [place]
    if place.is_dir():
        files = [path for path in place.rglob("*") if path.is_file() and guess(path) is not None]
    else:
        files = [Path(name) for name in glob.glob(str(place), recursive=True) if Path(name).is_file()]  # noqa: PTH207
    if wanted is not None:
        files = [path for path in files if guess(path) in (wanted, None)]
    if not files:
        if not place.exists() and not glob.has_magic(str(place)):
            raise UsageError(f"{pattern}: there is no such file or folder")
        kinds = ", ".join(suffix for known in RAW for suffix in format_of(known).SUFFIXES)
        what = f"of format {wanted}" if wanted else f"with documents ({kinds}; also .gz)"
        raise UsageError(f"{pattern}: no file {what} there")
    return sorted(files)


def whole_file(path: Path) -> Block:
    size = path.stat().st_size
    return Block(path=str(path), start=0, end=size, size_bytes=size)


def cut_lines(path: Path) -> Iterator[Block]:
    """Blocks of a file of lines; one that is compressed cannot be entered in the middle."""
    size = path.stat().st_size
    if path.suffix in PACKED or size <= BLOCK_BYTES:
        yield whole_file(path)
        return
    for start in range(0, size, BLOCK_BYTES):
        end = min(size, start + BLOCK_BYTES)
        yield Block(path=str(path), start=start, end=end, size_bytes=end - start)


def lines(block: Block) -> Iterator[tuple[str, bytes]]:
    """Each line that begins in the block, with its location. Over all blocks of a file every line occurs once."""
    path = Path(block.path)
    if path.suffix in PACKED:
        with unpacked(path) as file:
            try:
                for number, line in enumerate(file, start=1):
                    yield f"{path.name}:{number}", line
            except (EOFError, gzip.BadGzipFile, OSError, ValueError) as error:
                raise DataError(f"{path} is damaged or cut off: {error}; fetch it again") from None
        return
    with path.open("rb") as file:
        at = block.start
        if at:
            # A line that begins before the block is its predecessor's, also one that begins right at the border.
            file.seek(at - 1)
            at += len(file.readline()) - 1
        while at < block.end:
            line = file.readline()
            if not line:
                return
            yield f"{path.name} byte {at}", line
            at += len(line)


def unpacked(path: Path) -> BinaryIO:
    """The file's content, whatever it is compressed with."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.suffix == ".zst":
        try:
            zstd = importlib.import_module("compression.zstd")  # in the standard library from Python 3.14 on
        except ImportError:
            raise UsageError(f"{path}: .zst needs Python 3.14; decompress it first: zstd -d {path.name}") from None
        return cast(BinaryIO, zstd.open(path, "rb"))
    return path.open("rb")


def cache_folder(stated: str | None) -> Path:
    """Cache folder of tokenised and downloaded files."""
    return Path(stated or os.environ.get("TRAINMASTER_CACHE") or "~/.cache/trainmaster").expanduser()
