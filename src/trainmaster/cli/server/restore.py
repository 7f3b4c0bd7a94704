"""`trainmaster restore`: a home folder from a backup."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption, locate, needing


def restore(
    folder: Annotated[Path, typer.Argument(help="Folder that `trainmaster backup` wrote.")],
    home: HomeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Copy a backup into a home folder that has no database yet.

    It takes the place of the home that was backed up, with its jobs and rented machines: run a server on one of them.

    [bold]Examples[/]

      trainmaster restore /backups/trainmaster-2026-03-01 --home /data/trainmaster
    """
    with needing("the control plane"):
        from trainmaster.control import maintain
    from trainmaster.core.schema import to_plain
    from trainmaster.report import formats

    place, begun = locate(home), time.monotonic()
    made = maintain.restore(folder.absolute(), place)
    took_s = time.monotonic() - begun
    if as_json:
        document = {key: value for key, value in to_plain(made).items() if key != "left_out"}
        _console.as_json({"home": str(place), **document, "took_s": round(took_s, 3)})
        return
    size = formats.size(made.size_bytes)
    _console.out.print(f"restored to {place}: {', '.join(made.copied)} ({size} in {took_s:.1f} s)", soft_wrap=True)
    _console.note("it takes the place of the home that was backed up: do not start a server on both")
