"""Parquet files with the text in one column. Tokenised once, then read from the cache. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainmaster.core.errors import DataError, MissingExtra
from trainmaster.datasets._cached import create
from trainmaster.datasets.corpus.files import Block, Document, TextLocation

__all__ = ["SUFFIXES", "create", "cut", "documents"]

SUFFIXES = (".parquet",)
_ROWS_AT_ONCE = 1024


def cut(path: Path, location: TextLocation) -> Iterator[Block]:  # noqa: ARG001
    with _opened(path) as file:
        for group in range(file.num_row_groups):
            size = file.metadata.row_group(group).total_byte_size
            yield Block(path=str(path), start=group, end=group + 1, size_bytes=size)


def documents(block: Block, location: TextLocation) -> Iterator[Document]:
    path, groups = Path(block.path), list(range(block.start, block.end))
    with _opened(path) as file:
        if location.text_field not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise DataError(f"{path} has no column {location.text_field!r}; it has {names}")
        number = sum(file.metadata.row_group(group).num_rows for group in range(block.start))
        batches = file.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=groups, columns=[location.text_field])
        while True:
            try:
                batch = next(batches, None)
            except OSError as error:  # pyarrow: a page that cannot be decoded
                raise DataError(f"{path}, row group {block.start} is damaged: {error}; fetch it again") from None
            if batch is None:
                return
            for text in batch.column(0).to_pylist():
                where = f"{path.name} row {number}"
                number += 1
                if isinstance(text, str):
                    yield Document(where=where, text=text)
                else:
                    yield Document(where=where, fault=f"column {location.text_field!r} is {type(text).__name__}")


def _opened(path: Path) -> Any:
    try:
        from pyarrow import ArrowException  # type: ignore[import-untyped]
        from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]
    except ImportError:
        raise MissingExtra("Parquet", "data") from None
    try:
        return ParquetFile(path)
    except (OSError, ArrowException) as error:
        raise DataError(f"{path} is damaged or no Parquet file: {error}; fetch it again") from None
