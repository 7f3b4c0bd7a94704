"""`trainmaster examples`: specs and configs to begin with, as the package brings them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainmaster.core.errors import UsageError


def examples(
    name: Annotated[
        str | None, typer.Argument(help="Print this one: train.yaml, or train.", show_default="list them")
    ] = None,
    to: Annotated[Path | None, typer.Option("--to", metavar="DIR", help="Copy them into this folder.")] = None,
) -> None:
    """List the example specs, configs and scripts, print one, or copy them.

    Each drill-*.py is a small script of one trainer whose resume is proven: what to copy into your own.

    A file that is already there is never overwritten.

    [bold]Examples[/]

      trainmaster examples

      trainmaster examples train.yaml > job.yaml

      trainmaster examples drill-hf-trainer > train.py

      trainmaster examples --to examples/
    """
    from trainmaster.cli import _console

    files = {path.name: path for path in sorted(folder().glob("*.*")) if path.suffix in (".yaml", ".py")}
    if name is not None:
        name = next((full for full in files if name in (full, Path(full).stem)), name)
    if name is not None and name not in files:
        raise UsageError(f"no example {name!r}; there are {', '.join(files)}")
    chosen = [files[name]] if name is not None else list(files.values())
    if to is not None:
        for path in _copy(chosen, to):
            _console.out.out(str(path))
    elif name is not None:
        _console.out.out(files[name].read_text(encoding="utf-8"), end="")
    else:
        for path in chosen:
            _console.out.out(f"{path.name:<26} {_title(path)}")


def folder() -> Path:
    """The folder of the examples: in the package where it was installed, in examples/jobs of a checkout."""
    from trainmaster import cli

    package = Path(cli.__file__).parents[1]
    for place in (package / "examples", package.parents[1] / "examples" / "jobs"):
        if place.is_dir():
            return place
    raise UsageError("the examples are not part of this installation; see examples/jobs of the source")


def _copy(files: list[Path], to: Path) -> list[Path]:
    taken = [to / path.name for path in files if (to / path.name).exists()]
    if taken:
        raise UsageError(f"{taken[0]} is already there; name another folder")
    to.mkdir(parents=True, exist_ok=True)
    return [Path(to / path.name) for path in files if (to / path.name).write_bytes(path.read_bytes())]


def _title(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n")[0].lstrip('# "')
