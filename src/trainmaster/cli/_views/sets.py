"""Sets of runs as text: a line of the list, and the table of results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from trainmaster.cli import _console
from trainmaster.core.money.cost import dollars
from trainmaster.core.states import Status

if TYPE_CHECKING:
    from trainmaster.api.sets import SetLine, SetPage


def print_set(page: SetPage) -> None:
    """One set: its status, its cost, and a row for each trial with the best marked."""
    line = page.set
    _console.out.print(f"[bold]{escape(line.name)}[/] {line.id}")
    rows = {
        "status": f"{_console.paint(line.status)} · {count_text(line)}",
        "reason": escape(line.message),
        "at once": str(line.parallel),
        "price": f"{dollars(line.cost_cents)} so far" if line.cost_cents else "",
        "best loss": f"{line.best_loss:.4f}" if line.best_loss is not None else "",
    }
    for name, value in rows.items():
        if value:
            _console.out.print(f"{name:<11} {value}")
    table = Table(box=None, header_style="dim", pad_edge=False)
    keys = list(page.trials[0].values) if page.trials else []
    for column in ("", "trial", "job", *keys, "status", "step", "loss", "cost"):
        table.add_column(escape(column), justify="right" if column in ("step", "loss", "cost") else "left")
    for trial in page.trials:
        table.add_row(
            "*" if trial.best else "",
            escape(trial.name),
            trial.job[:8] if trial.job else "",
            *(escape(_value(trial.values.get(key))) for key in keys),
            _console.paint(trial.status) if trial.status else f"[dim]{trial.message or 'waits for its turn'}[/]",
            str(trial.step) if trial.step is not None else "",
            f"{trial.loss:.4f}" if trial.loss is not None else "",
            dollars(trial.cost_cents) if trial.cost_cents else "",
        )
    _console.out.print(table)


def count_text(line: SetLine) -> str:
    """`3 of 6 completed, 1 failed, 2 waiting`."""
    done = line.counts.get("completed", 0)
    rest = [f"{count} {word}" for word, count in line.counts.items() if word != "completed"]
    return ", ".join([f"{done} of {line.trials} completed", *rest])


def wait_text(line: SetLine) -> str:
    """Why trials of a set have not begun, as markup: `lr-sweep: 4 trials wait for `parallel: 2``."""
    waiting = line.counts["waiting"]
    started = sum(line.counts.get(status.value, 0) for status in Status if not status.final)
    why = f": {_console.plain(line.message)}" if line.message else " to begin"
    if started >= line.parallel:
        why = f" for `parallel: {line.parallel}`"
    return f"{_console.plain(line.name)}: {waiting} {'trial waits' if waiting == 1 else 'trials wait'}{why}"


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
