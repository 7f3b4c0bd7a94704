"""Plain text files: each file, each paragraph or each line is a document. Tokenised once, then read from the cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainmaster.core.errors import DataError
from trainmaster.datasets._cached import create
from trainmaster.datasets.corpus.files import Block, Document, TextLocation, cut_lines, lines, unpacked, whole_file

__all__ = ["SUFFIXES", "create", "cut", "documents"]

SUFFIXES = (".txt", ".text", ".md")


def cut(path: Path, location: TextLocation) -> Iterator[Block]:
    return cut_lines(path) if location.text_unit == "line" else iter([whole_file(path)])


def documents(block: Block, location: TextLocation) -> Iterator[Document]:
    if location.text_unit == "line":
        for where, line in lines(block):
            yield _document(where, line.rstrip(b"\r\n"))
    elif location.text_unit == "paragraph":
        paragraph: list[bytes] = []
        where = ""
        for here, line in lines(block):
            if line.strip():
                where = where or here
                paragraph.append(line)
            elif paragraph:
                yield _document(where, b"".join(paragraph))
                paragraph, where = [], ""
        if paragraph:
            yield _document(where, b"".join(paragraph))
    else:
        path = Path(block.path)
        try:
            with unpacked(path) as file:
                yield _document(path.name, file.read())
        except (EOFError, OSError) as error:
            raise DataError(f"{path} is damaged or cannot be read: {error}") from None


def _document(where: str, raw: bytes) -> Document:
    try:
        return Document(where=where, text=raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Document(where=where, fault=f"not UTF-8: {error.reason} at byte {error.start}")
