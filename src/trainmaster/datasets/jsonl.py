"""JSON lines: one object a line, its text in one field. Plain or .gz; tokenised once, then read from the cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from trainmaster.datasets._cached import create
from trainmaster.datasets.corpus.files import Block, Document, TextLocation, cut_lines, lines

__all__ = ["SUFFIXES", "create", "cut", "documents"]

SUFFIXES = (".jsonl", ".ndjson", ".json")


def cut(path: Path, location: TextLocation) -> Iterator[Block]:  # noqa: ARG001
    return cut_lines(path)


def documents(block: Block, location: TextLocation) -> Iterator[Document]:
    for where, line in lines(block):
        if line.strip():
            yield _document(where, line, location.text_field)


def _document(where: str, line: bytes, field: str) -> Document:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Document(where=where, fault=f"not JSON: {error}")
    if not isinstance(value, dict):
        return Document(where=where, fault=f"a JSON {type(value).__name__}, not an object; a line is one document")
    text = value.get(field)
    if not isinstance(text, str):
        what = f"is {type(text).__name__}" if field in value else f"is not there; it has {', '.join(list(value)[:8])}"
        return Document(where=where, fault=f"field {field!r} {what}")
    return Document(where=where, text=text)
