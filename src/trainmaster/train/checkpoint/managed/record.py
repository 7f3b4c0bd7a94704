"""What a managed checkpoint must be: one small JSON document for each step, written after all else of it.

The library keeps shards and an index of them; it derives whether a step is whole from the
number of ranks that read it. This document states it instead: a step without one is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainmaster.core import schema
from trainmaster.core.errors import CheckpointError, SpecError

INDEX = "index"  # the part that holds the index of the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank wrote, or the index: its size and the hash that the library uses too."""

    size_bytes: int
    xxh3_128: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One whole step. `run` and `state` are as in the manifest of a checkpoint on disk."""

    step: int
    namespace: str  # the library's, where the parts are
    ranks: int  # how many wrote it; any number may read it
    parts: Mapping[str, Part]  # by rank, and the index
    memory: bool  # whether the daemon took all of it
    s3: bool
    state: Mapping[str, Any]
    run: Mapping[str, Any]
    torch: str
    saved_at: str  # ISO, with its offset
    feed: Mapping[str, Any] | None = None  # of a data source that has a state of its own
    v: int = 1

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts.values())


def render(record: Record) -> bytes:
    """As JSON, with a digest over itself."""
    plain = schema.to_plain(record)
    return json.dumps({**plain, "digest": _digest(plain)}, sort_keys=True, allow_nan=False).encode()


def parse(text: bytes) -> Record:
    """Parse the record of a whole step; CheckpointError names the fault."""
    try:
        plain = json.loads(text)
        digest = plain.pop("digest")
        record = schema.build(Record, plain)
    except (ValueError, KeyError, TypeError, AttributeError, SpecError) as error:
        raise CheckpointError(f"its record is damaged: {type(error).__name__}: {error}") from None
    if digest != _digest(plain):
        raise CheckpointError("its record does not match its own digest")
    missing = {INDEX, *map(str, range(record.ranks))} - set(record.parts)
    if missing:
        raise CheckpointError(f"its record names no part {', '.join(sorted(missing))} of {record.ranks} ranks")
    return record


def _digest(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
