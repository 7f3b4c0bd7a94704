"""The part of a dataset that one of several ranks reads."""

from __future__ import annotations

from datasets import Dataset


def split_dataset_by_node(dataset: Dataset, rank: int, world_size: int) -> Dataset:
    rows = list(dataset)
    size = len(rows) // world_size
    return Dataset(rows[rank * size : (rank + 1) * size])
