"""`trainmaster report`: a job, or a folder of events, as a report in HTML, Markdown or JSON."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import DATABASE, DATABASE_FILE, HomeOption, locate, needing
from trainmaster.cli._jobs import connect
from trainmaster.cli._server import ServerOption
from trainmaster.core.errors import UsageError

if TYPE_CHECKING:
    from trainmaster.api.jobs import JobPage


def report(
    what: Annotated[
        str, typer.Argument(metavar="JOB|DIR", help="Job id or its beginning, or a folder with events.jsonl.")
    ],
    formats: Annotated[str, typer.Option("--format", help="html, md, json; more than one with commas.")] = "html",
    out: Annotated[
        Path | None,
        typer.Option(
            help="File, or folder for several; - prints it.",
            show_default="beside the job; with --server in this folder",
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the HTML report in the browser.")] = False,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    """Write the report of a job, or of a folder that holds an attempt's events.

    The HTML report is one file that needs nothing from outside: mail it, print it, keep it.

    [bold]Examples[/]

      trainmaster report 3f2a --open

      trainmaster report ./attempt --format md --out -

      trainmaster report 3f2a --format html,md,json --out reports/

      trainmaster report 3f2a --server https://trainmaster.example.org --out run.html
    """
    with needing("reports"):
        from trainmaster import report as reports
    wanted = [word.strip().lstrip(".") for word in formats.split(",") if word.strip()]
    unknown = [word for word in wanted if word not in reports.FORMATS]
    if unknown or not wanted:
        raise UsageError(f"--format {formats}: write one or more of {', '.join(reports.FORMATS)}")
    page, folder = _page(what, home, server)
    if out is not None and str(out) == "-":
        for word in wanted:
            _console.out.out(reports.FORMATS[word](page), end="", highlight=False)
        return
    paths = [reports.write(page, path) for path in _paths(wanted, out, folder)]
    for path in paths:
        _console.out.out(str(path))
    if show:
        _open(paths)


def _page(what: str, home: Path | None, server: str | None) -> tuple[JobPage, Path]:
    """The page, and the folder its report belongs in. The whole name of a job wins over a folder of that name."""
    is_folder = Path(what).is_dir()
    if "/" in what and not is_folder:
        raise UsageError(f"{what}: there is no such folder")
    if not is_folder or ("/" not in what and _names_job(what, home, server)):
        with connect(home, server) as jobs:
            page = jobs.show(jobs.find(what))
        if is_folder:
            _console.note(f"report of job {page.id}; for the folder of this name: trainmaster report ./{what}")
        return page, Path() if server else locate(home) / "jobs" / page.id
    from trainmaster.report.folder import read_folder

    return read_folder(Path(what)), Path(what)


def _names_job(word: str, home: Path | None, server: str | None) -> bool:
    """Whether a job has this name or id. A folder needs no database: where there is none, none is created."""
    if not (server or os.environ.get(DATABASE) or (locate(home) / DATABASE_FILE).exists()):
        return False
    with connect(home, server) as jobs:
        try:
            line = jobs.line(jobs.find(word))
        except UsageError:
            return False
    return word in (line.name, line.id)


def _paths(wanted: list[str], out: Path | None, folder: Path) -> list[Path]:
    if out is None or out.is_dir() or len(wanted) > 1:
        return [(out or folder) / f"report.{word}" for word in wanted]
    return [out if out.suffix else out.with_suffix(f".{wanted[0]}")]


def _open(paths: list[Path]) -> None:
    import webbrowser

    html = next((path for path in paths if path.suffix == ".html"), None)
    if html is None:
        raise UsageError("--open needs html among the formats")
    webbrowser.open(html.absolute().as_uri())
