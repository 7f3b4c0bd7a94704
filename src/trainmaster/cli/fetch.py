"""`trainmaster fetch`: what a job left, onto this disk."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from trainmaster.cli import _console, _server
from trainmaster.cli._home import HomeOption, StorageOption, find, open_home, open_storage
from trainmaster.cli._server import ServerOption
from trainmaster.core.errors import UsageError

if TYPE_CHECKING:
    from trainmaster.client import Client
    from trainmaster.client.files import Described
    from trainmaster.storage import Store
    from trainmaster.store import Database
    from trainmaster.store.rows import JobRow

_PIECE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Where files come from: a server, or the home folder itself."""

    kept: list[Described]
    pieces: Callable[[str, int], Iterator[bytes]]  # of a path, from an offset
    growing: list[tuple[int, str]]  # (attempt, stream) that only the target has so far
    read: Callable[[int, str, int], bytes]


def fetch(
    job: Annotated[str, typer.Argument(help="Job id, its unique beginning, or a name.")],
    to: Annotated[Path | None, typer.Argument(help="Folder to write to.", show_default="./<job's name>")] = None,
    only: Annotated[str | None, typer.Option(help="Only paths that begin with this, as outputs/.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    home: HomeOption = None,
    storage: StorageOption = None,
    server: ServerOption = None,
) -> None:
    """Download what a job left: project file, logs, events, outputs. Checksums are verified.

    Run it again to go on after a cut: files that are there and right are left alone. Of a job that still runs, the logs
    come as far as they are written.

    [bold]Examples[/]

      trainmaster fetch 3f2a

      trainmaster fetch llama-trial results/ --only outputs/ --server https://trainmaster.example.org
    """
    if server:
        with _server.connect(server) as client:
            job_id = _server.find(client, job)
            to = to or Path(client.job(job_id).name)
            written = _all(_from_server(client, job_id), to, only)
    else:
        folder, db = open_home(home)
        row = find(db, job)
        to = to or Path(row.name)
        written = _all(_from_home(db, row, open_storage(storage, folder)), to, only)
    if json:
        _console.as_json({"files": [{"path": str(path), "size_bytes": path.stat().st_size} for path in written]})
        return
    total = sum(path.stat().st_size for path in written)
    _console.out.print(f"{len(written)} files, {total:,} bytes in {_console.plain(str(to))}")


def _all(source: _Source, folder: Path, only: str | None) -> list[Path]:
    from trainmaster.client import files

    kept = [item for item in source.kept if only is None or item.path.startswith(only)]
    growing = [item for item in source.growing if only is None or f"attempts/{item[0]}/{item[1]}".startswith(only)]
    if not kept and not growing:
        raise UsageError("the job has left nothing yet" if only is None else f"nothing of the job begins with {only!r}")
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    written = []
    with Progress(*columns, console=_console.err, transient=True, disable=not _console.err.is_terminal) as progress:
        bar = progress.add_task("fetch", total=sum(item.size_bytes for item in kept))
        for item in kept:
            progress.update(bar, description=_console.plain(item.path[-40:]))
            place = files.place(folder, item.path)
            files.download(
                functools.partial(source.pieces, item.path), item, place, told=functools.partial(progress.advance, bar)
            )
            written.append(place)
        for attempt, stream in growing:
            place = files.place(folder, f"attempts/{attempt}/{stream}")
            files.grow(place, functools.partial(source.read, attempt, stream))
            written.append(place)
    return written


def _from_server(client: Client, job_id: str) -> _Source:
    return _Source(
        kept=list(client.artifacts(job_id)),
        pieces=functools.partial(client.pieces, job_id),
        growing=[(item.attempt, item.stream) for item in client.log_streams(job_id) if not item.stored],
        read=lambda attempt, stream, offset: client.logs(job_id, stream, attempt=attempt, offset=offset),
    )


def _from_home(db: Database, row: JobRow, storage: Store) -> _Source:
    from trainmaster.control import logs
    from trainmaster.store import artifacts
    from trainmaster.store.attempts import list_attempts

    kept = {item.path: item for item in artifacts.list_artifacts(db, row.id)}
    attempts = {attempt.number: attempt for attempt in list_attempts(db, row.id)}

    def pieces(path: str, offset: int) -> Iterator[bytes]:
        while piece := logs.read_kept(storage, kept[path], offset=offset, limit=_PIECE):
            yield piece
            offset += len(piece)

    streams = asyncio.run(logs.list_streams(db, row, list(attempts.values())))
    return _Source(
        kept=list(kept.values()),
        pieces=pieces,
        growing=[(item.attempt, item.stream) for item in streams if not item.stored],
        read=lambda number, stream, offset: asyncio.run(
            logs.read(db, storage, row, attempts[number], stream, offset=offset, limit=_PIECE)
        ),
    )
