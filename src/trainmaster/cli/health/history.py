"""`trainmaster history`: which GPUs and nodes failed before, and how often."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption, locate
from trainmaster.cli._views import remedy_text

if TYPE_CHECKING:
    from trainmaster.cluster.health.history import Entry
    from trainmaster.store.database import Database


def history(
    serial: Annotated[
        str | None, typer.Option(help="Every run of one GPU: its serial number, UUID, or a part of its key.")
    ] = None,
    repeat: Annotated[bool, typer.Option("--repeat", help="Only who failed in more than one run.")] = False,
    add: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="First record this bundle; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    home: HomeOption = None,
) -> None:
    """Show repeat offenders: the same GPU that failed n times on m nodes.

    A GPU is known by its serial number (else its UUID, else its node and bus), so its history follows it from node to
    node. Counted are the checks from this home folder and the pre-flights of its jobs, the newest 50 of each node. A
    run that is recorded twice counts once.

    [bold]Examples[/]

      trainmaster history --repeat

      trainmaster history --serial 1652922003456

      trainmaster history --add evidence/
    """
    from trainmaster.cluster.health import journal

    place = locate(home)
    for bundle in add or []:
        added = journal.record(place, remedy_text.load(bundle))
        _console.note(f"recorded {bundle}" if added else f"{bundle} was recorded before")
    if serial is not None:
        _show_gpu(place, serial, as_json)
    else:
        _show_offenders(place, 2 if repeat else 1, as_json)


def _show_offenders(home: Path, least: int, as_json: bool) -> None:
    from trainmaster.cluster.health import journal
    from trainmaster.cluster.health.history import offenders
    from trainmaster.pages.parts import failed_preflights

    jobs = _read_jobs(home, failed_preflights.list_failed)
    entries = offenders([*journal.history(home), *jobs], least=least)
    if as_json:
        _console.as_json(entries)
        return
    if not entries:
        _console.note("no GPU failed" + (" more than once" if least > 1 else "") + " in the runs that are recorded")
        return
    table = _console.table("who", "failed", "of runs", "on nodes", "checks", "last", "reason", fold=True)
    for entry in entries:
        table.add_row(
            remedy_text.plain(entry.key),
            f"[bold red]{entry.failed}[/]" if entry.failed > 1 else str(entry.failed),
            str(entry.runs),
            remedy_text.plain(f"{len(entry.nodes)}: {', '.join(entry.nodes)}"),
            remedy_text.plain(", ".join(entry.checks)),
            remedy_text.plain(entry.last),
            remedy_text.plain(entry.reason),
        )
    _console.out.print(table)


def _read_jobs(home: Path, read: Callable[[Database], list[Entry]]) -> list[Entry]:
    """Entries from the pre-flights of the jobs of a home; none where it has no jobs, or cannot have any."""
    from trainmaster.cli._home import is_new

    if is_new(home) or importlib.util.find_spec("sqlalchemy") is None:
        return []
    from trainmaster.cli._home import open_home

    _, db = open_home(home)
    try:
        return read(db)
    finally:
        db.close()


def _show_gpu(home: Path, word: str, as_json: bool) -> None:
    from trainmaster.cluster.health import journal
    from trainmaster.pages.parts import failed_preflights

    # By the value alone, as its pre-flights state it: serial:…
    jobs = _read_jobs(home, lambda db: failed_preflights.list_of_gpu(db, word.rpartition(":")[2]))
    every = {(entry.run, entry.key): entry for entry in [*journal.history(home), *jobs]}
    whole = [entry for entry in every.values() if entry.key.partition(":")[2] == word]
    entries = sorted(whole or [entry for entry in every.values() if word in entry.key], key=lambda entry: entry.at)
    if as_json:
        _console.as_json(entries)
        return
    if not entries:
        _console.note(f"nothing is recorded of {remedy_text.plain(word)}")
        return
    table = _console.table("when", "who", "node", "device", "verdict", "checks", "reason", fold=True)
    for entry in entries:
        words = (entry.at, entry.key, entry.node, entry.device or "")
        verdict = _console.paint(str(entry.verdict))
        table.add_row(
            *map(remedy_text.plain, words),
            verdict,
            remedy_text.plain(", ".join(entry.checks)),
            remedy_text.plain(entry.reason),
        )
    _console.out.print(table)
