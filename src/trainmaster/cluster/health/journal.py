"""Append-only JSON-lines files in the home folder: the history of verdicts, and the remedies applied."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainmaster.core import schema
from trainmaster.core.errors import SpecError, UsageError

if TYPE_CHECKING:
    from trainmaster.cluster.health.history import Entry
    from trainmaster.core.health import ClusterHealth

HISTORY = "history.jsonl"
REMEDIES = "remedies.jsonl"


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows, durable on return. Concurrent writers are serialised by a lock."""
    text = "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.open("ab+") as out:
            fcntl.flock(out, fcntl.LOCK_EX)
            if out.seek(0, os.SEEK_END) > 0:
                out.seek(-1, os.SEEK_END)
                if out.read(1) != b"\n":
                    text = "\n" + text  # a partial line of a dead writer must not be joined with this one
            out.write(text.encode())
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}; give another folder with --home"
        ) from None


def read(path: Path) -> list[dict[str, Any]]:
    """Every complete row. A partial line, left by a dead writer, is skipped."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def record(home: Path, health: ClusterHealth, *, bundle_sha256: str = "", target: str = "") -> int:
    """Add a run to the history; the number of rows added, 0 if the run is already there.

    `bundle_sha256` is the digest of its evidence bundle (cluster/health/evidence.py); `target`: where its nodes are.
    """
    from trainmaster.cluster.health.history import entries

    new = entries(health)
    known = {entry.run for entry in history(home)}
    if not new or new[0].run in known:
        return 0
    append(
        home / HISTORY, [schema.to_plain(replace(entry, bundle_sha256=bundle_sha256, target=target)) for entry in new]
    )
    return len(new)


def find_bundle(home: Path, bundle_sha256: str) -> str | None:
    """Time of the recorded run whose evidence bundle has this digest; None: no run here wrote it."""
    return next((entry.at for entry in history(home) if entry.bundle_sha256 == bundle_sha256), None)


def history(home: Path) -> list[Entry]:
    """Every entry that can be parsed."""
    from trainmaster.cluster.health.history import Entry

    listed = []
    for row in read(home / HISTORY):
        try:
            listed.append(schema.build(Entry, row))
        except SpecError:
            continue
    return listed
