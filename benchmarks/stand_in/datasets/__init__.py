"""Stands in for Hugging Face's `datasets` where that is not installed: what torchtitan's text dataset asks of it.

A dataset is the lines of the JSON files of a folder, in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Dataset:
    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    def skip(self, many: int) -> Dataset:
        return Dataset(self._rows[many:])


def load_dataset(path: str, *, split: str) -> Dataset:
    """Every row of `path`/*.json, one a line; there is no other split than `train`."""
    if split != "train":
        raise ValueError(f"split {split!r}: there is only 'train'")
    files = sorted(Path(path).glob("*.json"))
    return Dataset([json.loads(line) for file in files for line in file.read_text().splitlines()])
