"""The table of `trainmaster top`: one line a job, with a sparkline of its loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from trainmaster.cli import _console
from trainmaster.cli.jobs.jobs import age
from trainmaster.core.money.cost import dollars

if TYPE_CHECKING:
    from trainmaster.api.jobs import JobLine

POINTS = 32  # of a curve; a sparkline shows half of them
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 16
_GAP = 2  # between two columns
_RIGHT = ("step", "loss", "tokens/s", "cost", "age")
# What gives way on a narrow terminal, in this order, down to so many characters; 0: the column is left out. A figure
# that is cut is worse than none.
_YIELD = (
    ("curve", 8), ("machines", 12), ("name", 16), ("state", 10), ("machines", 0), ("curve", 4), ("name", 8), ("age", 0),
    ("curve", 0), ("tokens/s", 0), ("cost", 0), ("name", 0), ("loss", 0),
)  # fmt: skip
_EMPTY = "no jobs yet: trainmaster submit spec.yaml"
_BESIDE = 4  # lines of a screen that are not jobs: head, foot and the key line


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A job and its loss, oldest point first; None is not a number."""

    job: JobLine
    curve: tuple[float | None, ...]


def sparkline(values: Sequence[float | None], *, width: int = _WIDTH) -> str:
    """A curve in so many characters, from its lowest to its highest value; a gap is a space."""
    if not values or not width:
        return ""
    cells = []
    for place in range(min(width, len(values))):
        size = len(values) / min(width, len(values))
        part = values[math.floor(place * size) : math.floor((place + 1) * size)]
        numbers = [value for value in part if value is not None]
        cells.append(sum(numbers) / len(numbers) if numbers else None)
    known = [cell for cell in cells if cell is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if cell is None else _BARS[round((cell - low) * scale)] for cell in cells)


def render(
    rows: Sequence[Row], *, width: int, chosen: str | None = None, height: int | None = None, trouble: str = ""
) -> Group:
    """The table; with a height only the jobs around the chosen one that fit, and a line of keys below."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    widths = fit([_cells(row) for row in rows], width)
    if height is not None and "name" in widths:  # the bar of the chosen job goes to the edge
        widths["name"] += max(0, width - _total(widths))
    for column, size in widths.items():
        table.add_column(
            "" if column == "curve" else column, justify="right" if column in _RIGHT else "left", no_wrap=True,
            overflow="ellipsis", width=size,
        )  # fmt: skip
    for row in _around(rows, chosen, height):
        cells = _cells(row, curve=widths.get("curve", 0), machines=widths.get("machines", 0))
        style = "reverse" if row.job.id == chosen and height is not None else ""
        table.add_row(*(cells[column] for column in widths), style=style)
    note = Text(trouble, style="yellow") if trouble else Text("" if rows else _EMPTY, style="dim")
    if height is None:
        return Group(table if rows else note)
    keys = Text("↑↓ choose   Enter show   l log   q end", style="dim")
    return Group(table, note, keys)


def fit(rows: Sequence[Mapping[str, str]], width: int) -> dict[str, int]:
    """How wide each column is on a screen of this width; those that are empty, or have no room, are left out."""
    widths: dict[str, int] = {}
    for column in rows[0] if rows else ():
        if longest := max(Text.from_markup(row[column]).cell_len for row in rows):
            widths[column] = max(longest, 0 if column == "curve" else len(column))
    name = widths.get("name", 0)
    for column, least in _YIELD:
        over = _total(widths) - width
        if over > 0 and column in widths:
            widths[column] = max(min(least, widths[column]), widths[column] - over)
            if not least:
                del widths[column]
    if "name" in widths:  # a column that was left out may leave room
        widths["name"] = min(name, widths["name"] + max(0, width - _total(widths)))
    return widths


def _total(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def _around(rows: Sequence[Row], chosen: str | None, height: int | None) -> Sequence[Row]:
    """The rows that fit on the screen, the chosen one among them."""
    if height is None:
        return rows
    room = max(1, height - _BESIDE)
    at = next((place for place, row in enumerate(rows) if row.job.id == chosen), 0)
    first = max(0, min(at - room // 2, len(rows) - room))
    return rows[first : first + room]


def _cells(row: Row, *, curve: int = _WIDTH, machines: int | None = None) -> dict[str, str]:
    """The cells of a row as markup; the curve and the names of machines in so many characters."""
    job = row.job
    state = _console.paint(job.status)
    if job.stage is not None and str(job.stage) != str(job.status):
        state += f" [dim]{_console.plain(str(job.stage))}[/]"
    elif job.reason is not None and job.final:
        state += f" [dim]{_console.plain(str(job.reason))}[/]"
    steps = "" if job.step is None else f"{job.step:,}" + (f"/{job.steps:,}" if job.steps is not None else "")
    return {
        "job": job.id[:8],
        "name": _console.plain(job.name),
        "state": state,
        "step": steps,
        "loss": job.loss_text or (f"{job.loss:.4f}" if job.loss is not None else ""),
        "curve": f"[cyan]{sparkline(row.curve, width=curve)}[/]",
        "tokens/s": f"{job.tokens_per_s:,.0f}" if job.tokens_per_s is not None else "",
        "cost": dollars(job.cost_cents) if job.cost_cents is not None else "",
        "machines": _console.plain(_name_machines(job.machines, machines)),
        "age": age(job.created_at),
    }


def _name_machines(names: Sequence[str], width: int | None) -> str:
    """`gpu-01 +3`; where the name is too long it is cut, not the number."""
    if not names:
        return ""
    more = f" +{len(names) - 1}" if len(names) > 1 else ""
    if width is None or len(names[0]) + len(more) <= width:
        return names[0] + more
    return names[0][: max(0, width - len(more) - 1)] + "…" + more
