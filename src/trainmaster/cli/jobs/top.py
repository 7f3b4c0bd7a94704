"""`trainmaster top`: the jobs as a live table on a terminal."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption
from trainmaster.cli._jobs import connect
from trainmaster.cli._server import ServerOption
from trainmaster.cli._views import keyboard, top_table
from trainmaster.core.errors import TrainmasterError
from trainmaster.core.states import Status

if TYPE_CHECKING:
    from trainmaster.api.jobs import JobLine
    from trainmaster.cli._jobs import Jobs

_FIRST = (Status.RUNNING, Status.CANCELLING, Status.PENDING)  # what is under way stands before what is over


def top(
    project: Annotated[str | None, typer.Option(help="Only this project.")] = None,
    find: Annotated[
        str | None, typer.Option(help="Only with an id that begins so, or this in the job's or the submitter's name.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=200, help="Maximum number of jobs.")] = 30,
    every: Annotated[float, typer.Option(min=0.5, max=3600, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table; as without a terminal.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON once.")] = False,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    """Watch jobs: state, step, loss with its curve, tokens/s, cost, machines; those under way first.

    Keys: arrows choose a job, Enter shows it, l prints the end of its log, q ends.

    [bold]Examples[/]

      trainmaster top

      trainmaster top --project research --every 5

      trainmaster top --server https://trainmaster.example.org

      trainmaster top --once
    """
    with connect(home, server, reads=True) as jobs:
        view = _View(jobs, project=project, find=find, limit=limit)
        if json:
            view.look()
            _console.as_json({"jobs": view.rows})
        elif once or not (sys.stdout.isatty() and sys.stdin.isatty()):
            view.look()
            _console.out.print(top_table.render(view.rows, width=_console.out.width))
        else:
            _watch(view, every=every, home=home, server=server)


class _View:
    """What is shown: the rows, and which of them is chosen."""

    def __init__(self, jobs: Jobs, *, project: str | None, find: str | None, limit: int) -> None:
        self._jobs, self._project, self._find, self._limit = jobs, project, find, limit
        self._curves: dict[str, tuple[int | None, tuple[float | None, ...]]] = {}
        self.rows: list[top_table.Row] = []
        self.chosen: str | None = None
        self.trouble = ""

    def look(self) -> None:
        """Read the jobs, and curves of those that have made a step since."""
        lines: dict[str, JobLine] = {}
        for status in (*_FIRST, None):
            if len(lines) < self._limit:
                asked = {"status": status, "project": self._project, "find": self._find, "offset": 0}
                page = self._jobs.list(**asked, limit=self._limit)  # type: ignore[arg-type]
                lines.update({line.id: line for line in page.jobs if line.id not in lines})
        rows = []
        for line in list(lines.values())[: self._limit]:
            step, curve = self._curves.get(line.id, (None, ()))
            if line.step is not None and line.step != step:
                curve = tuple(point[2] for point in self._jobs.curve(line.id, points=top_table.POINTS).points)
                self._curves[line.id] = (line.step, curve)
            rows.append(top_table.Row(job=line, curve=curve))
        self.rows = rows
        ids = [row.job.id for row in rows]
        self.chosen = self.chosen if self.chosen in ids else ids[0] if ids else None

    def try_look(self) -> None:
        """The same; where the server does not answer, what was read before stays, with the reason."""
        try:
            self.look()
            self.trouble = ""
        except TrainmasterError as error:
            self.trouble = str(error)

    def move(self, by: int) -> None:
        ids = [row.job.id for row in self.rows]
        if self.chosen in ids:
            self.chosen = ids[max(0, min(len(ids) - 1, ids.index(self.chosen) + by))]


def _watch(view: _View, *, every: float, home: Path | None, server: str | None) -> None:
    from rich.live import Live

    view.look()  # a wrong home or server is an error of the verb, not a line below the table
    with keyboard.raw_keys() as keys:
        while True:
            with Live(console=_console.out, screen=True, auto_refresh=False) as live:
                key = _until_key(view, live, keys, every)
            if key == "q":
                return
            assert view.chosen is not None
            with keys.cooked():
                _open(view.chosen, log=key == "l", home=home, server=server)
                _console.note("any key goes back")
            keys.read(None)


def _until_key(view: _View, live: object, keys: keyboard.Keys, every: float) -> str:
    """Show and follow until a key opens something or ends."""
    from rich.live import Live

    assert isinstance(live, Live)
    due = time.monotonic() + every
    while True:
        width, height = live.console.size
        shown = top_table.render(view.rows, width=width, chosen=view.chosen, height=height, trouble=view.trouble)
        live.update(shown, refresh=True)
        key = keys.read(max(0.0, due - time.monotonic()))
        if key in ("up", "down", "page-up", "page-down"):
            view.move({"up": -1, "down": 1, "page-up": -10, "page-down": 10}[key])
        elif key == "q" or (key in ("enter", "l") and view.chosen is not None):
            return key
        if time.monotonic() >= due:
            view.try_look()
            due = time.monotonic() + every


def _open(job_id: str, *, log: bool, home: Path | None, server: str | None) -> None:
    """The page of a job, or the end of its log, as the verbs print them."""
    from trainmaster.cli.jobs import logs, show

    try:
        if log:
            logs.logs(job_id, tail=200, home=home, server=server)
        else:
            show.show(job_id, home=home, server=server)
    except TrainmasterError as error:
        _console.error(error)
