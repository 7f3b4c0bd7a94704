"""Words to the person at the terminal: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from trainmaster.core.errors import SpecError, TrainmasterError
from trainmaster.core.schema import to_plain

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

COLOURS = {
    "pass": "green", "warn": "yellow", "fail": "bold red", "skip": "dim", "error": "magenta",
    "PASS": "bold green", "WARN": "bold yellow", "FAIL": "bold red", "INCOMPLETE": "bold magenta",
    "pending": "dim", "running": "cyan", "completed": "green", "failed": "red",
    "cancelling": "yellow", "cancelled": "yellow",
}  # fmt: skip


def paint(word: str, *, width: int = 0) -> str:
    """A verdict or status in its colour, as rich markup; padded to `width` as it will be seen."""
    colour, padded = COLOURS.get(word), f"{word:<{width}}".replace("[", "\\[")
    return f"[{colour}]{padded}[/]" if colour else padded


def as_json(value: object) -> None:
    """One JSON document on standard output and nothing else."""
    out.out(json.dumps(to_plain(value), indent=2, default=_text))


def json_line(value: object) -> None:
    """One JSON object on one line, for pipes."""
    out.out(json.dumps(to_plain(value), default=_text))


def note(text: str) -> None:
    err.print(f"[dim]{text}[/]")


def error(wrong: TrainmasterError) -> None:
    """An error as the user should see it; each fault of a document on its own line."""
    if isinstance(wrong, SpecError):
        many = len(wrong.faults)
        err.print(f"[bold red]error[/] {many} {'fault' if many == 1 else 'faults'}; nothing was created")
        for fault in wrong.faults:
            err.print(f"  [bold]{plain(fault.path)}[/]: {plain(fault.message)}", soft_wrap=True)
        return
    err.print(f"[bold red]error[/] {plain(' '.join(str(wrong).split()))}", soft_wrap=True)


def plain(text: str) -> str:
    """Text from outside, with its square brackets kept from being read as markup."""
    return text.replace("[", "\\[")


def _text(value: Any) -> str:
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
