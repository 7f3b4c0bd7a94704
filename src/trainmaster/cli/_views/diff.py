"""What changed since another run, at the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from trainmaster.cli import _console

if TYPE_CHECKING:
    from trainmaster.cluster.health.diff import Change

_COLOUR = {"worse": "bold red", "new": "yellow", "gone": "yellow", "better": "green", "changed": "cyan"}


def show(changes: list[Change], *, since: str) -> None:
    if not changes:
        _console.out.print(f"nothing changed since {escape(since)}")
        return
    table = _console.table(f"since {escape(since)}", "node", "check", "device", "then", "now", "reason", fold=True)
    for change in changes:
        table.add_row(
            f"[{_COLOUR[change.kind]}]{change.kind}[/]",
            escape(change.node),
            escape(change.check),
            escape(change.device or ""),
            _console.paint(str(change.before or "")),
            _console.paint(str(change.after or "")),
            escape(change.reason),
        )
    _console.out.print()
    _console.out.print(table)
