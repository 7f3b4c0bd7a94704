"""Terminal output: results on standard output, everything else on standard error.

Text of a job, a node or a file is never markup and never control here: `plain` escapes it where it meets markup, and
both consoles replace control characters in everything they print.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shlex
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.errors import MarkupError
from rich.markup import escape
from rich.text import Text

from trainmaster.core.clean_text import clean
from trainmaster.core.errors import SpecError, TrainmasterError
from trainmaster.core.schema import to_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from rich.table import Table


class CleanConsole(Console):
    """A console that prints no control characters, no emoji codes, and broken markup as it is written."""

    def render_str(self, text: str, **options: Any) -> Text:
        text = clean(text)
        try:
            return super().render_str(text, **options)
        except MarkupError:  # text of a job that a caller did not escape; to end the verb here would lose the rest
            return super().render_str(text, **{**options, "markup": False})

    def out(self, *objects: Any, **options: Any) -> None:
        super().out(*(clean(str(item)) for item in objects), **options)

    def on_broken_pipe(self) -> None:
        """`| head` has read enough. rich would end the process with 1, which is the FAIL of a drill; `boundary` ends
        each verb with its own code."""
        self.quiet = True  # what is printed on the way out
        raise  # noqa: PLE0704 (the error that rich has caught)


out = CleanConsole(highlight=False, emoji=False)
err = CleanConsole(stderr=True, highlight=False, emoji=False)

COLOURS = {
    "pass": "green", "warn": "yellow", "fail": "bold red", "skip": "dim", "error": "magenta",
    "PASS": "bold green", "WARN": "bold yellow", "FAIL": "bold red", "INCOMPLETE": "bold magenta",
    "pending": "dim", "running": "cyan", "completed": "green", "failed": "red",
    "cancelling": "yellow", "cancelled": "yellow",
}  # fmt: skip


def paint(word: str, *, width: int = 0) -> str:
    """A verdict or status in its colour, as rich markup; padded to `width` as it will be seen."""
    colour, padded = COLOURS.get(word), plain(f"{word:<{width}}")
    return f"[{colour}]{padded}[/]" if colour else padded


def table(*titles: str, right: Collection[str] = (), fold: bool = False) -> Table:
    """An empty table without lines, as verbs print them. `fold`: what does not fit goes on below, not cut off."""
    from rich.table import Table

    made = Table(box=None, header_style="dim", pad_edge=False)
    for title in titles:
        made.add_column(title, justify="right" if title in right else "left", overflow="fold" if fold else "ellipsis")
    return made


@contextlib.contextmanager
def byte_bar(what: str, size_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, in bytes; the block is given the function that moves it."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=err, transient=True) as bar:
        yield functools.partial(bar.advance, bar.add_task(what, total=size_bytes))


def as_json(value: object) -> None:
    """One JSON document on standard output and nothing else."""
    out.out(json.dumps(to_plain(value), indent=2, default=_text))


def json_line(value: object) -> None:
    """One JSON object on one line, for pipes."""
    out.out(json.dumps(to_plain(value), default=_text))


def note(text: str) -> None:
    err.print(f"[dim]{text}[/]", soft_wrap=True)


def note_newest(name: str, job_id: str, many: int, *, what: str = "jobs") -> None:
    """Say which of several jobs with one name is meant."""
    note(f"{many} {what} have the name {plain(name)}: this is the newest, {job_id[:8]}")


def count(number: int, what: str) -> str:
    """`1 file`, `12,000 files`."""
    return f"{number:,} {what}{'s' if number != 1 else ''}"


def program() -> str:
    """This command as the shell finds it: by its path in an environment that is not active, as after `make demo`."""
    path = Path(sys.argv[0])
    return shlex.quote(str(path)) if path.name == "trainmaster" and not shutil.which("trainmaster") else "trainmaster"


def error(failure: TrainmasterError, *, creates: bool = False) -> None:
    """An error as the user should see it; each fault of a document on its own line.

    `creates`: the verb creates a job, so the user is told that there is none.
    """
    if isinstance(failure, SpecError):
        many, rest = len(failure.faults), "; nothing was created" if creates else ""
        err.print(f"[bold red]error[/] {many} {'fault' if many == 1 else 'faults'}{rest}")
        for fault in failure.faults:
            err.print(f"  [bold]{plain(fault.path)}[/]: {plain(fault.message)}", soft_wrap=True)
        return
    err.print(f"[bold red]error[/] {plain(' '.join(str(failure).split()))}", soft_wrap=True)


def plain(text: str) -> str:
    """Text from outside as markup that shows it as it is."""
    return escape(clean(text))


def log_bytes(data: bytes) -> bytes:
    """A piece of a log as standard output takes it: byte for byte into a file or a pipe, cleaned for a terminal."""
    return clean(data.decode(errors="replace")).encode() if sys.stdout.isatty() else data


def _text(value: Any) -> str:
    if isinstance(value, datetime):  # as the API writes times
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return str(value)
