"""Small documents with a number in each, as files and as prepared folders."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from trainmaster.core.config.data import DataConfig
from trainmaster.core.schema import build
from trainmaster.datasets import Rows, Shape, Source, load
from trainmaster.datasets.corpus.index import Index
from trainmaster.datasets.corpus.prepare import Recipe, prepare

END = 255  # of the byte tokenizer


def texts(count: int, *, start: int = 0) -> list[str]:
    """Of very different lengths, no two alike anywhere."""
    return [f"<{number}>" + noise(number)[: number * 70 % 130] for number in range(start, start + count)]


def noise(number: int) -> str:
    return "".join(hashlib.sha256(f"{number} {part}".encode()).hexdigest() for part in range(3))


def write_jsonl(path: Path, documents: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def make(folder: Path, documents: list[str], *, files: int = 1, **recipe: Any) -> Index:
    """A prepared folder of these documents, with a shard for every raw file."""
    paths = [
        write_jsonl(folder.parent / f"{folder.name}-raw" / f"{n}.jsonl", documents[n::files]) for n in range(files)
    ]
    settings = Recipe(**{"shard_bytes": 1, "held_out_share": 0.0, **recipe})
    return prepare(paths, folder, settings, processes=1, source={}, stamps=[])


def source(*, sequence_tokens: int = 32, batch_sequences: int = 12, **data: Any) -> Source:
    config = build(DataConfig, data)
    return load(config, Shape(sequence_tokens=sequence_tokens, batch_sequences=batch_sequences))


def pairs(rows: Rows) -> list[tuple[int, int]]:
    """Every counted token with its target."""
    tokens, targets = rows.tokens.flatten().tolist(), rows.targets.flatten().tolist()
    return [(token, target) for token, target in zip(tokens, targets, strict=True) if target != -100]


def text_of(tokens: list[int]) -> str:
    return bytes(tokens).decode("latin-1")


def row_texts(rows: Rows) -> list[str]:
    return [text_of(row) for row in rows.tokens.tolist()]
