"""The command `trainmaster`: the verbs of this folder as one application, each behind the error boundary."""

from __future__ import annotations

import importlib
import io
import pkgutil
import sys
from typing import Annotated

import typer

from trainmaster import __version__, cli
from trainmaster.cli import _boundary

# The order of the help page: the way a user meets the verbs. A verb that is not named here comes last.
_ORDER = (
    "demo",
    "examples",
    "check",
    "bandwidth",
    "isolate",
    "rejudge",
    "remedy",
    "readmit",
    "history",
    "data",
    "train",
    "drill",
    "export",
    "submit",
    "jobs",
    "show",
    "logs",
    "events",
    "cancel",
    "resume",
    "fetch",
    "cost",
    "reap",
    "serve",
    "work",
    "token",
    "report",
)


def verbs() -> list[str]:
    """Every verb: the modules of this folder, in the order of the help page."""
    names = [module.name for module in pkgutil.iter_modules(cli.__path__)]
    found = [name for name in names if not name.startswith("_") and name != "main"]
    return sorted(found, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))


def build(*, guarded: bool = False) -> typer.Typer:
    """The whole command line as one typer application; `guarded` puts each verb behind the error boundary."""
    app = typer.Typer(
        name="trainmaster",
        help="Prove the cluster, train on it, never lose a run.",
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name in verbs():
        verb = getattr(importlib.import_module(f"trainmaster.cli.{name}"), name)
        if isinstance(verb, typer.Typer):  # a verb with verbs of its own
            app.add_typer(_guard_all(verb, name) if guarded else verb, name=name)
        else:
            app.command(name=name)(_boundary.guard(verb, name) if guarded else verb)

    @app.callback()
    def options(
        version: Annotated[
            bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
        ] = False,
    ) -> None:
        """Prove the cluster, train on it, never lose a run."""

    return app


def run() -> None:
    """The console script. A character that the terminal cannot show is escaped, never a crash."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    build(guarded=True)()


def _guard_all(group: typer.Typer, name: str) -> typer.Typer:
    for command in group.registered_commands:
        if command.callback is not None and not hasattr(command.callback, "__wrapped__"):  # once, however often built
            command.callback = _boundary.guard(command.callback, name)
    return group


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trainmaster {__version__}")
        raise typer.Exit
