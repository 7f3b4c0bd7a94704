"""The findings of one node as a table: what was judged, a row each; then what does not apply, folded by its reason."""

from __future__ import annotations

from rich.markup import escape

from trainmaster.cli import _console
from trainmaster.core.health import NodeHealth
from trainmaster.core.results import Verdict

WIDE = 120  # columns; with fewer, five columns would break each sentence into words


def show(health: NodeHealth) -> None:
    """Print it. On a narrow terminal the action stands below its reason, not beside it."""
    from trainmaster.checks import document

    wide = _console.out.width >= WIDE
    table = _console.table("check", "device", "verdict", "reason", *(["what to do"] if wide else []), fold=True)
    skipped: dict[str, list[str]] = {}
    judged: dict[tuple[str, str, str, str], list[str]] = {}  # findings that say the same are one row
    for result in health.results:
        for finding in result.findings:
            if finding.verdict is Verdict.SKIP:
                skipped.setdefault(finding.reason, []).append(" ".join(filter(None, (result.check, finding.device))))
                continue
            key = (finding.device or "", str(finding.verdict), finding.reason, finding.action or "")
            judged.setdefault(key, []).append(result.check)
    for (device, verdict, reason, action), checks in judged.items():
        label = ", ".join(checks) if len(checks) <= 3 else f"{', '.join(checks[:2])} and {len(checks) - 2} more"
        below = f"\n[dim]what to do: {escape(action)}[/]" if action and not wide else ""
        row = (label, _console.plain(device), _console.paint(verdict), escape(reason) + below)
        table.add_row(*row, *([escape(action)] if wide else []))
    _console.out.print(table)
    for reason, names in skipped.items():
        _console.out.print(f"[dim]skip  {escape(', '.join(names))}: {escape(reason)}[/]")
    _console.out.print(f"{_console.paint(str(health.overall))}  {escape(document.count_line(health))}")
