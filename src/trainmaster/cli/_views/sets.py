"""Sets of runs as text: a line of the list, and the table of results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.markup import escape

from trainmaster.cli import _console
from trainmaster.core.errors import UsageError
from trainmaster.core.money.cost import dollars, spent_words
from trainmaster.core.states import Status

if TYPE_CHECKING:
    from trainmaster.api.sets import SetLine, SetPage, Trial


def refuse_set(word: str, page: SetPage) -> UsageError:
    """What to type where a word that names a set was given for a job."""
    line, begun = page.set, [trial.name for trial in page.trials if trial.job is not None]
    runs = f"{line.trials} run{'s' if line.trials != 1 else ''}"
    what = f"{word!r} is a set of {runs}, not a job; `trainmaster show {line.name}` lists them"
    return UsageError(f"{what}: write one of them, as {begun[0]}" if begun else f"{what}; none has begun yet")


def print_set(page: SetPage) -> None:
    """One set: its status, its cost, and a row for each trial with the best marked."""
    line = page.set
    _console.out.print(f"[bold]{escape(line.name)}[/] {line.id}")
    rows = {
        "status": f"{_console.paint(line.status)} · {count_text(line)}",
        "reason": escape(line.message),
        "at once": str(line.parallel),
        "price": spent_words(line.cost_cents, final=line.status.final) if line.cost_cents else "",
        "schedule": line.schedule or "",
        "next run": next_text(line) if line.schedule and not line.status.final else "",
        "search": f"{line.search}, {line.goal} {escape(line.metric)}" if line.search else "",
        f"best {escape(line.metric)}": _figure(line.best_value),
    }
    for name, value in rows.items():
        if value:
            _console.out.print(f"{name:<11} {value}")
    keys = list(page.trials[0].values) if page.trials else []
    columns = ("", "trial", "job", *map(escape, keys), "status", "step", escape(line.metric), "cost")
    table = _console.table(*columns, right={"step", escape(line.metric), "cost"})
    for trial in page.trials:
        table.add_row(
            "*" if trial.best else "",
            escape(trial.name),
            trial.job[:8] if trial.job else "",
            *(escape(_value(trial.values.get(key))) for key in keys),
            _status(trial),
            str(trial.step) if trial.step is not None else "",
            (trial.loss_text if trial.value is None and line.metric == "loss" else None) or _figure(trial.value),
            dollars(trial.cost_cents) if trial.cost_cents else "",
        )
    _console.out.print(table)


def _status(trial: Trial) -> str:
    if trial.pruned:
        return f"[yellow]{escape(trial.message or 'pruned')}[/]"
    if trial.status is None:
        return f"[dim]{trial.message or 'waits for its turn'}[/]"
    why = "" if trial.job else f" [dim]{_console.plain(trial.message)}[/]"  # a job says it itself
    return _console.paint(trial.status) + why


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if 0.001 <= abs(value) < 1e6 or value == 0 else f"{value:.4g}"


def count_text(line: SetLine) -> str:
    """`3 of 6 completed, 1 failed, 2 waiting`."""
    done = line.counts.get("completed", 0)
    rest = [f"{count} {word}" for word, count in line.counts.items() if word != "completed"]
    return ", ".join([f"{done} of {line.trials} completed", *rest])


def next_text(line: SetLine) -> str:
    """When the next run of a schedule begins, in the zone of this machine."""
    if line.paused:
        return "when it is resumed: it is paused"
    return f"{line.next_at.astimezone():%Y-%m-%d %H:%M %Z}" if line.next_at is not None else "never"


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
