"""`trainmaster submit`: a spec goes in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainmaster.cli import _console, _server, _yaml_file
from trainmaster.cli._home import HomeOption, locate, open_home
from trainmaster.cli._server import ServerOption
from trainmaster.core.spec import parse_spec

if TYPE_CHECKING:
    from trainmaster.core.spec import JobSpec


def submit(
    spec: Annotated[Path, typer.Argument(help="The job as YAML.")],
    values: Annotated[list[str] | None, typer.Argument(help="Values to put over the file's: key.path=value.")] = None,
    on: Annotated[str | None, typer.Option("--on", help="Target, over the one in the file.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done; touch nothing.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Drive and watch the job to its end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the job as JSON.")] = False,
    key: Annotated[
        str | None, typer.Option("--key", help="Names this submission: sent again, it gives the same job.")
    ] = None,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    """Submit a job.

    A bad spec is refused with every fault at once (exit code 2) and nothing is created.

    [bold]Examples[/]

      trainmaster submit job.yaml --dry-run

      trainmaster submit job.yaml train.steps=500 --follow

      trainmaster submit job.yaml --server https://trainmaster.example.org --key nightly-2026-03-01
    """
    document = _yaml_file.load(spec)
    words = [*(values or []), *([f"target={on}"] if on else [])]
    job = document.read(lambda value: parse_spec(_yaml_file.override(value, words)))
    if dry_run:
        from trainmaster import targets

        placement = targets.Placement(
            attempt="00000000-0000-4000-8000-000000000000.1", spec=job, job_folder=locate(home) / "jobs" / "JOB"
        )
        _console.out.out(targets.load(job.target).plan(placement).render(), end="")
        return
    if server:
        _send(server, job, key=key, follow=follow, json=json)
        return
    folder, db = open_home(home)
    from trainmaster import control

    row, _ = control.submit_once(db, job, key=key)
    if json:
        _console.as_json(row)
    else:
        _console.out.print(f"submitted [bold]{row.name}[/] as {row.id}")
    if follow:
        from trainmaster.cli._follow import follow as follow_job
        from trainmaster.cli._inline_reconciler import driving

        _console.note("Ctrl-C stops watching, not the job")
        with driving(db, folder):
            row = follow_job(db, row.id)
        _console.out.print(f"{_console.paint(row.status)} {_console.plain(row.message)}")
        raise typer.Exit(0 if row.status == "completed" else 1)
    if not json and not (folder / "server.json").exists():
        _console.note("no server runs on this home yet; start one with: trainmaster serve")


def _send(server: str, job: JobSpec, *, key: str | None, follow: bool, json: bool) -> None:
    from trainmaster.core.schema import to_plain

    # What was not stated is left out: the server has its own defaults, and may be newer or older than we are.
    spec: dict[str, Any] = {name: value for name, value in to_plain(job).items() if value is not None}
    with _server.connect(server) as client:
        made = client.submit(spec, key=key)
        if json:
            _console.as_json(made)
        else:
            _console.out.print(f"{'submitted' if made.new else 'found'} [bold]{made.name}[/] as {made.id}")
        if not follow:
            return
        from trainmaster.cli._follow import View

        _console.note("Ctrl-C stops watching, not the job")
        view = View()
        with view.progress:
            for event in client.events(made.id):
                view.show_event(event)
        ended = client.wait(made.id)
        _console.out.print(f"{_console.paint(ended.status)} {_console.plain(ended.message)}")
        raise typer.Exit(0 if ended.status == "completed" else 1)
