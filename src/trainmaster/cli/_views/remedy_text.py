"""Shared by `remedy`, `readmit` and `history`: load a bundle, print commands, escape text."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.cli import _console
from trainmaster.core.errors import SpecError, UsageError

if TYPE_CHECKING:
    from trainmaster.core.health import ClusterHealth

HEALTH = "health.json"


def load(bundle: Path) -> ClusterHealth:
    """The run in a bundle (or in a health.json itself)."""
    from trainmaster.core.health import ClusterHealth

    path = bundle / HEALTH if bundle.is_dir() else bundle
    try:
        return ClusterHealth.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; `trainmaster check --out DIR` makes it") from None
    except (SpecError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: {str(error)[:300]}") from None


def load_whole(bundle: Path) -> ClusterHealth:
    """The run in a bundle, with errors for files that were changed or are missing; a health.json alone as it is."""
    from trainmaster.cluster.health import evidence

    return evidence.load(bundle) if (bundle / HEALTH).is_file() else load(bundle)


def show(commands: Sequence[Sequence[str]]) -> None:
    """Print commands ready to paste."""
    for command in commands:
        _console.out.out(shlex.join(command), highlight=False)


def tell(done: str, outcomes: Iterable[tuple[str, str | None]]) -> bool:
    """Say what became of each node, by its fault; whether one was not done."""
    failed = False
    for node, fault in outcomes:
        if fault is None:
            _console.note(f"{done}  {plain(node)}")
        else:
            failed = True
            _console.err.print(f"[bold red]not done[/] {plain(fault)}", soft_wrap=True)
    return failed


def plain(text: str) -> str:
    """External text made safe for a terminal: no markup, no control characters."""
    from rich.markup import escape

    return escape("".join(letter if letter.isprintable() else "\ufffd" for letter in text))
