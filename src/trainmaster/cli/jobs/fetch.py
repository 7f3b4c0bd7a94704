"""`trainmaster fetch`: what a job left, onto this disk."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption, StorageOption
from trainmaster.cli._jobs import connect
from trainmaster.cli._server import ServerOption
from trainmaster.core.clean_text import clean
from trainmaster.core.errors import UsageError

if TYPE_CHECKING:
    from trainmaster.cli._jobs import Jobs


def fetch(
    job: Annotated[str, typer.Argument(help="Job id, its unique beginning, or a name.")],
    to: Annotated[Path | None, typer.Argument(help="Folder to write to.", show_default="./<job's name>")] = None,
    only: Annotated[str | None, typer.Option(help="Only paths that begin with this, as outputs/.")] = None,
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="Only its newest checkpoint, also of your own script.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    home: HomeOption = None,
    storage: StorageOption = None,
    server: ServerOption = None,
) -> None:
    """Download what a job left: project file, logs, events, outputs; or its newest checkpoint.

    Checksums are verified; the checkpoints of a script of your own have none, and their sizes are compared.

    Run it again to go on after a cut: files that are there and right are left alone. Of a job that still runs, the logs
    come as far as they are written.

    [bold]Examples[/]

      trainmaster fetch 3f2a

      trainmaster fetch 3f2a --checkpoint

      trainmaster fetch llama-trial results/ --only outputs/ --server https://trainmaster.example.org
    """
    with connect(home, server, storage=storage, reads=True) as jobs:
        job_id = jobs.find(job)
        to = to or Path(jobs.line(job_id).name)
        written = fetch_checkpoint(jobs, job_id, to) if checkpoint else _fetch(jobs, job_id, to, only)
    if json:
        _console.as_json({"files": [{"path": str(path), "size_bytes": path.stat().st_size} for path in written]})
        return
    total = sum(path.stat().st_size for path in written)
    _console.out.print(f"{_console.count(len(written), 'file')}, {total:,} bytes in {_console.plain(str(to))}")


def fetch_checkpoint(jobs: Jobs, job_id: str, folder: Path) -> list[Path]:
    """Download the newest checkpoint into `folder`/step-…; its manifest comes last and marks it as whole.

    That of a script of one's own comes into `folder`/checkpoints.
    """
    from trainmaster.client import files

    checkpoint = jobs.checkpoint(job_id)
    written = []
    with _bar(sum(file.size_bytes for file in checkpoint.files)) as (progress, bar):
        for file in checkpoint.files:
            place = files.place(folder, f"{checkpoint.name}/{file.path}")
            pieces = functools.partial(jobs.checkpoint_pieces, job_id, checkpoint.step, file.path)
            files.download(pieces, file, place, on_progress=functools.partial(progress.advance, bar))
            written.append(place)
    return written


@contextlib.contextmanager
def _bar(size_bytes: int) -> Iterator[tuple[Progress, TaskID]]:
    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=_console.err, transient=True, disable=not _console.err.is_terminal) as progress:
        yield progress, progress.add_task("fetch", total=size_bytes)


def _fetch(jobs: Jobs, job_id: str, folder: Path, only: str | None) -> list[Path]:
    from trainmaster.client import files

    stored = [item for item in jobs.artifacts(job_id) if only is None or item.path.startswith(only)]
    growing = {f"attempts/{item.attempt}/{item.stream}": item for item in jobs.log_streams(job_id) if not item.stored}
    growing = {path: item for path, item in growing.items() if only is None or path.startswith(only)}
    if not stored and not growing:
        raise UsageError("the job has no files yet" if only is None else f"no file of the job begins with {only!r}")
    written = []
    with _bar(sum(item.size_bytes for item in stored)) as (progress, bar):
        for file in stored:
            progress.update(bar, description=clean(file.path[-40:]))
            place = files.place(folder, file.path)
            pieces = functools.partial(jobs.pieces, job_id, file.path)
            files.download(pieces, file, place, on_progress=functools.partial(progress.advance, bar))
            written.append(place)
        for path, log in growing.items():
            place = files.place(folder, path)
            files.grow(place, lambda at, s=log: jobs.log_piece(job_id, s.stream, attempt=s.attempt, offset=at))  # type: ignore[misc]
            written.append(place)
    return written
