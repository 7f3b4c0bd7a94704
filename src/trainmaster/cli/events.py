"""`trainmaster events`: what happened, as rows that were ingested exactly once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli import _console, _server
from trainmaster.cli._home import HomeOption, find, open_home
from trainmaster.cli._server import ServerOption

if TYPE_CHECKING:
    from trainmaster.client import Event
    from trainmaster.store.rows import EventRow


def events(
    job: Annotated[str, typer.Argument(help="Job id, its unique beginning, or a name.")],
    phase: Annotated[str | None, typer.Option(help="Only this phase, for example CHECKPOINT.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job is over.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    """Print a job's events; a garbage line is shown as it came, with what is wrong with it.

    [bold]Examples[/]

      trainmaster events 3f2a --phase CHECKPOINT

      trainmaster events 3f2a -f --json | jq .data.loss
    """
    if server:
        with _server.connect(server) as client:
            for told in client.events(_server.find(client, job), follow=follow, phase=phase):
                _print(told, json=json)
        return
    _, db = open_home(home)
    from trainmaster.store import jobs
    from trainmaster.store.events import list_events

    row, after = find(db, job), None
    while True:
        now = jobs.find_job(db, row.id)
        over = now is None or now.status.final
        while rows := list_events(db, row.id, phase=phase, after=after, limit=1000):
            for event in rows:
                _print(event, json=json)
            after = (int(rows[-1].attempt.rpartition(".")[2]), rows[-1].offset)
        if not follow or over:
            return
        time.sleep(0.5)


def _print(event: Event | EventRow, *, json: bool) -> None:
    if json:
        _console.json_line(event)
        return
    when = event.ts.astimezone().strftime("%H:%M:%S") if event.ts else "--:--:--"
    words = " ".join(f"{key}={value}" for key, value in event.data.items())
    what = f"{event.phase} {event.event}" if event.phase else f"garbage ({event.fault}): {event.text}"
    _console.out.out(f"{when} {what} {words}".rstrip())
