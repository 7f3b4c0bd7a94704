"""The operator's own records in the home folder: checks of nodes, and nodes that were drained."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.core.errors import UsageError
from trainmaster.core.results import WEIGHT, Verdict

if TYPE_CHECKING:
    from trainmaster.cluster.health.history import Entry


def read_history(home: Path) -> tuple[Entry, ...]:
    """Every entry of the history of checks; read again when its file has changed."""
    from trainmaster.cluster.health import journal

    return _read(home, _stamp(home / journal.HISTORY))


def read_targets(home: Path) -> dict[str, str]:
    """By node: the target through which the operator checked it last. Checks of before this was kept name none."""
    return {entry.node: entry.target for entry in read_history(home) if entry.target}


def read_out(home: Path) -> dict[str, str]:
    """Nodes that Trainmaster has drained and not resumed, with the time."""
    from trainmaster.cluster.health import journal
    from trainmaster.cluster.remedy.remedy import still_out

    return {out.node: out.at for out in still_out(journal.read(home / journal.REMEDIES))}


def read_verdicts(home: Path) -> Mapping[str, tuple[datetime, Verdict]]:
    """By node: when the operator's newest check of it began, and the worst that it said. Empty where the file cannot be
    read: the queue goes on."""
    from trainmaster.cluster.health import journal

    try:
        return _read_verdicts(home, _stamp(home / journal.HISTORY))
    except UsageError:
        return {}


def moment_of(text: str) -> datetime | None:
    """The time of an entry; None where its node wrote something else."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return None
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)


@functools.lru_cache(maxsize=4)
def _read_verdicts(home: Path, stamp: tuple[int, int] | None) -> Mapping[str, tuple[datetime, Verdict]]:
    newest: dict[str, tuple[datetime, Verdict]] = {}
    for entry in _read(home, stamp):
        at = moment_of(entry.at)
        held = newest.get(entry.node)
        if at is None or (held is not None and at < held[0]):
            continue
        worst = max(entry.verdict, held[1], key=WEIGHT.__getitem__) if held is not None and at == held[0] else None
        newest[entry.node] = at, worst or entry.verdict
    return newest


@functools.lru_cache(maxsize=4)
def _read(home: Path, stamp: tuple[int, int] | None) -> tuple[Entry, ...]:  # noqa: ARG001 (the key of the cache)
    from trainmaster.cluster.health import journal

    return tuple(journal.history(home))


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_size
