"""The command `trainmaster`: the verbs as one application, each behind the error boundary."""

from __future__ import annotations

import copy
import difflib
import functools
import importlib
import io
import pkgutil
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from trainmaster import __version__, cli
from trainmaster.cli._views import boundary, target_option

# The folders of verbs, and the order of the help page: the way a user meets them. A verb that is not named comes last.
_GROUPS = ("health", "training", "jobs", "server")
_ORDER = (
    "demo examples check bandwidth accept cluster baseline isolate rejudge remedy readmit history data plan train "
    "drill export submit jobs top show logs events cancel pause resume fetch queue nodes cost goodput reap serve work "
    "token target backup restore rebuild delete report sim"
).split()


# Words of other programs for our verbs.
_OTHER_WORDS = {
    "status": "show", "describe": "show", "ps": "jobs", "list": "jobs", "ls": "jobs", "run": "submit",
    "launch": "submit", "apply": "submit", "sbatch": "submit", "sweep": "submit", "stop": "cancel", "down": "cancel",
    "kill": "cancel", "scancel": "cancel", "squeue": "queue", "sinfo": "nodes", "drain": "nodes drain",
    "undrain": "nodes readmit", "uncordon": "nodes readmit", "budget": "cost", "budgets": "cost", "quota": "queue",
    "quotas": "queue", "user": "token list", "users": "token list",
    "get": "jobs", "sacct": "jobs", "info": "show", "inspect": "show", "why": "show",
    "start": "submit", "srun": "submit", "create": "submit", "up": "serve", "server": "serve", "ui": "serve",
    "attach": "logs", "tail": "logs", "watch": "top", "rm": "delete", "remove": "delete", "retry": "resume",
    "gpus": "nodes", "pull": "fetch", "download": "fetch", "cp": "fetch", "estimate": "plan", "doctor": "check",
    "health": "check", "bench": "bandwidth", "torchrun": "train", "nccl-tests": "bandwidth", "cordon": "nodes drain",
    "autopsy": "show", "metrics": "events", "version": "--version", "help": "--help",
}  # fmt: skip
# Options of other programs, by verb.
_OTHER_OPTIONS = {
    ("submit", "--priority"): "It is a value of the spec: trainmaster submit FILE.yaml queue.priority=high",
    ("submit", "--after"): "It is a value of the spec: trainmaster submit FILE.yaml 'after.jobs=[NAME]'",
    ("queue", "--priority"): "--set-priority JOB=high changes the priority of a job that waits",
    ("queue", "-u"): "--project NAME shows one project; trainmaster jobs --by NAME lists a person's jobs",
    ("queue", "--user"): "--project NAME shows one project; trainmaster jobs --by NAME lists a person's jobs",
    ("jobs", "-u"): "--by NAME lists a person's jobs",
    ("jobs", "--user"): "--by NAME lists a person's jobs",
    ("jobs", "-a"): "Jobs that are over are listed too; --limit N shows more",
    ("jobs", "--all"): "Jobs that are over are listed too; --limit N shows more",
    ("jobs", "-n"): "--limit N shows so many",
    ("jobs", "--state"): "--status running lists those that run",
    ("submit", "--name"): "It is a value of the spec: trainmaster submit FILE.yaml name=NAME",
    ("submit", "--env"): "It is a value of the spec: trainmaster submit FILE.yaml env.NAME=VALUE",
    ("submit", "--gpus"): "It is a value of the spec: resources.processes_per_node=N (one for each GPU)",
    ("submit", "--nodes"): "It is a value of the spec: trainmaster submit FILE.yaml resources.nodes=2",
    ("submit", "-N"): "It is a value of the spec: trainmaster submit FILE.yaml resources.nodes=2",
    ("submit", "-n"): "It is a value of the spec: resources.nodes=N, or resources.processes_per_node=N on each",
    ("submit", "--time"): "It is a value of the spec: trainmaster submit FILE.yaml limits.timeout_s=3600",
    ("submit", "--wait"): "--follow shows the job to its end",
    ("submit", "--detach"): "A job is not followed unless you write --follow",
    ("submit", "-d"): "A job is not followed unless you write --follow",
    ("submit", "--target"): "--on TARGET chooses it",
    ("logs", "--since"): "--tail N prints the last lines",
    ("logs", "-c"): "--rank N chooses a rank, --agent the agent's own log",
    ("logs", "-p"): "--attempt N chooses an earlier attempt",
    ("logs", "--previous"): "--attempt N chooses an earlier attempt",
    ("cancel", "--all"): "Name the jobs: trainmaster jobs --status running lists them; a set is cancelled by its name",
    ("cancel", "-y"): "It does not ask",
    ("delete", "-y"): "--yes deletes without asking",
    ("delete", "-f"): "--yes deletes without asking",
}
# Of every verb that has --json.
_FORMAT_OPTIONS = frozenset({"-o", "--output", "--format", "--yaml"})
_ON_PAGE = "Runs are compared on the page Compare of 'trainmaster serve'."
_ELSEWHERE = {
    "compare": _ON_PAGE,
    "diff": _ON_PAGE,
    "audit": "The audit log is on the page Settings of 'trainmaster serve'.",
    "login": "Put a token into TRAINMASTER_TOKEN_FILE; 'trainmaster token create' makes one.",
    "whoami": "You are who the token in TRAINMASTER_TOKEN_FILE or TRAINMASTER_TOKEN is of.",
}


@functools.cache
def groups() -> dict[str, str]:
    """The folder of every verb: a verb is a public module of one of them. In the order of the help page."""
    here = Path(cli.__path__[0])
    found = {module.name: group for group in _GROUPS for module in pkgutil.iter_modules([str(here / group)])}
    public = [name for name in found if not name.startswith("_")]
    public.sort(key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))
    return {name: found[name] for name in public}


def verbs() -> list[str]:
    """Every verb, in the order of the help page."""
    return list(groups())


class _Verbs(TyperGroup):
    """The verbs as commands, each imported when it is called: `jobs` does not import `check`."""

    guarded = False
    _overview = False  # the help page of the program is being written

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 (click's signature)
        return verbs()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 (click's signature)
        if cmd_name not in verbs():
            return None
        if self._overview:
            return TyperCommand(cmd_name, help=summary(cmd_name))
        return _load(cmd_name, guarded=self.guarded)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0]
        if word not in verbs() and not word.startswith("-") and not ctx.resilient_parsing:
            close = difflib.get_close_matches(word, verbs(), n=1, cutoff=0.7)
            meant = _OTHER_WORDS.get(word) or (close[0] if close else None)
            if word == "help" and len(args) > 1 and args[1] in verbs():
                meant = f"{args[1]} --help"
            hint = _ELSEWHERE.get(word) or (f"Did you mean '{meant}'?" if meant else "")
            ctx.fail(f"No such command '{word}'. {hint}".rstrip())
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._overview = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._overview = False


class _Verb(TyperCommand):
    """A verb whose help names the targets that there are."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as wrong:  # typer may bring a click of its own
            option = getattr(wrong, "option_name", None)
            hint = _OTHER_OPTIONS.get((str(self.name), str(option)))
            if hint is None and option in _FORMAT_OPTIONS:
                has = {word for item in self.params for word in item.opts}
                to_file = " to standard output, --out names a place" if "--out" in has else ""
                hint = f"--json prints JSON{to_file}" if "--json" in has else None
            if hint:
                ctx.fail(f"No such option: {option}. {hint}")
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for parameter in self.params:
            if text := getattr(parameter, "help", None):
                parameter.help = target_option.fill(text)  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)


class _GuardedVerbs(_Verbs):
    guarded = True


def build(*, guarded: bool = False) -> typer.Typer:
    """The whole command line as one typer application; `guarded` puts each verb behind the error boundary."""
    app = typer.Typer(
        name="trainmaster",
        cls=_GuardedVerbs if guarded else _Verbs,
        help="Prove the cluster, train on it, never lose a run.",
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def options(
        version: Annotated[
            bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
        ] = False,
    ) -> None:
        """Prove the cluster, train on it, never lose a run."""

    return app


def summary(name: str) -> str:
    """The first paragraph of a verb's help, read from its source: importing every verb would take a second."""
    source = (Path(cli.__path__[0]) / groups()[name] / f"{name}.py").read_text(encoding="utf-8")
    match = re.search(rf'^def {name}\(.*?\) -> None:\n    """(.*?)(?:\n\n|""")', source, re.DOTALL | re.MULTILINE)
    match = match or re.search(r'^    help="""(.*?)(?:\n\n|""")', source, re.DOTALL | re.MULTILINE)
    assert match is not None, f"the verb {name} has no help"
    return " ".join(match[1].split())


def _load(name: str, *, guarded: bool) -> Any:
    module = importlib.import_module(f"trainmaster.cli.{groups()[name]}.{name}")
    verb = getattr(module, name)
    app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False, add_completion=False)
    if isinstance(verb, typer.Typer):  # a verb with verbs of its own
        app.add_typer(_guard_all(verb, name) if guarded else verb, name=name)
        group = typer.main.get_group(app)
        return group.commands[name]
    context = getattr(module, "CONTEXT", None)  # how click reads the words of this verb
    app.command(name=name, cls=_Verb, context_settings=context)(boundary.guard(verb, name) if guarded else verb)
    return typer.main.get_command(app)


def run() -> None:
    """The console script. A character that the terminal cannot show is escaped, never a crash."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    build(guarded=True)()


def _guard_all(group: typer.Typer, name: str) -> typer.Typer:
    """A copy of a group with each verb behind the error boundary; the module's own is also built without."""
    guarded = copy.copy(group)
    guarded.registered_commands = [copy.copy(command) for command in group.registered_commands]
    for command in guarded.registered_commands:
        if command.callback is not None:
            command.callback = boundary.guard(command.callback, name)
    if (own := guarded.registered_callback) is not None and own.callback is not None:  # what it does without a verb
        guarded.registered_callback = copy.copy(own)
        guarded.registered_callback.callback = boundary.guard(own.callback, name)
    return guarded


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trainmaster {__version__}")
        raise typer.Exit
