"""`trainmaster drill`: kill it, damage it, resume it, prove it. The proof is a table, a verdict and a report."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from trainmaster.cli import _console
from trainmaster.cli._documents import kind
from trainmaster.cli.interrupt import INTERRUPTED
from trainmaster.cli.training import _command_drill as command_drill
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import MissingExtra, SpecError, UsageError
from trainmaster.core.results import exit_code
from trainmaster.core.schema import build_new
from trainmaster.documents import yaml_file

if TYPE_CHECKING:
    from trainmaster.cli._views.drill_report import Report
    from trainmaster.train.drill.plan import DrillPlan


def drill(
    config: Annotated[
        str | None,
        typer.Argument(help="A training config, a job spec with a `command:`, or after `--` the command itself."),
    ] = None,
    values: Annotated[
        list[str] | None, typer.Argument(help="Values to put over the file's: key.path=value; or the command's words.")
    ] = None,
    command: Annotated[
        Path | None, typer.Option("--command", metavar="JOB.yaml", help="A job spec with a `command:`.")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option("--processes", "-n", min=1, help="Ranks; without: one per GPU, or two on CPUs; a command: one."),
    ] = None,
    other: Annotated[
        int | None,
        typer.Option(min=0, help="Ranks of the last resume; without: half as many. 0 leaves it out, as one GPU does."),
    ] = None,
    kills: Annotated[
        int | None, typer.Option(min=1, max=20, help="How often the run is killed.", show_default="4")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the kills: the same seed kills at the same places.")] = 0,
    strike: Annotated[
        list[str] | None, typer.Option(help="Of a command: only these strikes; `list` names them.", metavar="NAME")
    ] = None,
    resume_command: Annotated[
        str | None, typer.Option(help="Of a command: what starts it again; without: the same command.")
    ] = None,
    workdir: Annotated[
        Path | None, typer.Option(help="Of a command: its files; without: the spec's folder, or this one.")
    ] = None,
    link: Annotated[
        list[str] | None, typer.Option(help="Of a command: an entry to link, not copy: unprotected.", metavar="NAME")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the report, and every attempt's logs and events.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Prove that a run is never lost: train, kill ranks with SIGKILL, damage a checkpoint, resume, compare.

    A training config is drilled with our trainer: once undisturbed, short (40 steps and eight saves unless you state
    `steps=` and `checkpoint.every_steps=`), then killed at places drawn from the seed, with a flipped bit in the newest
    checkpoint and the last resume on another number of ranks.

    A command is any program that trains with torch, unchanged: twice undisturbed, then struck by SIGKILL, SIGTERM and
    SIGSTOP, during a save and before one, with damaged checkpoints. Weights, optimizer, learning rate, random numbers
    and data are compared step by step; what is not restored is named with its cause. It works in copies of its folder.

    Your own runs are not touched. Ends with 0 (PASS), 1 (FAIL), 2 (wrong usage), 3 (INCOMPLETE: not all was seen).

    [bold]Examples[/]

      trainmaster drill llama.yaml --kills 8 --seed 7 --out proof/

      trainmaster drill llama.yaml steps=200 checkpoint.every_steps=10 --processes 8 --other 6

      trainmaster drill --out proof/ -- python train.py --steps 200

      trainmaster drill job.yaml --strike all --strike saving
    """
    command_drill.list_strikes(strike or (), as_json=as_json)
    _refuse_full(out)
    options = command_drill.Options(
        strike=tuple(strike or ()), resume_command=resume_command, workdir=workdir, link=tuple(link or ())
    )
    setup = command_drill.choose(config, values or [], command, options)
    if setup is not None:
        if other is not None or kills is not None:
            raise UsageError("--other and --kills belong to the drill of a training config; a command takes --strike")
        setup = command_drill.settle(setup, processes, seed)
        if not as_json:
            command_drill.show_plan(setup)
        _prove(lambda folder, say: command_drill.run(setup, folder, say), out, as_json=as_json)
    assert config is not None, "without a config there is a command"
    plan = _plan(Path(config), values or [], processes=processes, other=other, kills=kills or 4, seed=seed)
    if not as_json:
        _show_plan(plan)
    _prove(lambda folder, say: _run(plan, folder, say), out, as_json=as_json)


def _plan(
    config: Path, words: list[str], *, processes: int | None, other: int | None, kills: int, seed: int
) -> DrillPlan:
    document = yaml_file.load(config)
    kind.require_config(document, config)
    wanted = document.read(lambda value: build_new(TrainConfig, yaml_file.override(value, words)), words)
    limit = count_gpus(wanted)
    ranks = processes or limit or 2
    if limit and max(ranks, other or 0) > limit:
        raise UsageError(f"{max(ranks, other or 0)} ranks need as many GPUs, and this node shows {limit}; device=cpu")
    for count in filter(None, (ranks, other)):
        if faults := list(wanted.faults_on(count)):
            raise SpecError(faults)
    from trainmaster.train.drill import plan as plans

    given = {word.partition("=")[0] for word in words}
    return plans.make(wanted, processes=ranks, other=other, kills=kills, seed=seed, limit=limit, given=given)


def _run(plan: DrillPlan, folder: Path, say: Callable[[str, int, int], None]) -> Report:
    from trainmaster.cli._views import drill_proof
    from trainmaster.train.drill.run import Drill, Interrupted

    try:
        proof = Drill(plan, folder, say).run()
    except Interrupted as interrupted:
        proof = interrupted.proof
    return drill_proof.report(proof)


def _refuse_full(out: Path | None) -> None:
    if out is not None and out.exists() and any(out.iterdir()) and not command_drill.list_leftovers(out):
        raise UsageError(f"--out {out}: not empty; name a new folder, or remove it")


def _prove(
    run: Callable[[Path, Callable[[str, int, int], None]], Report], out: Path | None, *, as_json: bool
) -> NoReturn:
    """Run a drill in its folder, show and keep its report, and end with its exit code."""
    from trainmaster.cli._views import drill_report
    from trainmaster.cluster.termination import until_terminated
    from trainmaster.drill import attempt

    unsaved: Exception | None = None
    # To the end: `timeout` sends SIGTERM twice, and the second must not cut off what is told. The first ends a drill as
    # Ctrl-C does: nothing of it runs on, and nothing stays in memory or in /tmp.
    with until_terminated():
        with _folder(out) as folder, _progress(quiet=as_json) as say:
            try:
                report = run(folder.absolute(), say)
            except (OSError, attempt.DrillFailed) as cause:
                failed = attempt.no_room(folder.absolute(), cause) or cause
                if as_json and isinstance(failed, attempt.DrillFailed):
                    _console.as_json(drill_report.document_of_none(failed))
                raise failed from None
            try:
                if out is not None:
                    drill_report.save(report, out)
            except OSError as cause:  # what was found is told all the same
                unsaved = attempt.no_room(folder.absolute(), cause) or cause
        if as_json:
            _console.as_json(report.document)
        else:
            drill_report.show(report)
        if unsaved is not None:
            raise unsaved
        if report.interrupted:
            kept = f"the report of what was run, and the attempts until then, are in {out}"
            if out is None:
                kept = "nothing of it is kept: --out DIR keeps the report, and every attempt's logs and events"
            _console.note(f"interrupted; {kept}")
            raise typer.Exit(INTERRUPTED)
        if out is not None and not as_json:
            _console.note(f"report in {out}")
    raise typer.Exit(exit_code(report.overall))


def count_gpus(config: TrainConfig) -> int | None:
    """Number of ranks that this node's GPUs take, or None where the run is on CPUs."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise MissingExtra("training", "train")
    if config.device == "cpu":
        return None
    from trainmaster.train.drill import plan as plans

    return plans.count_gpus() or None


@contextlib.contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for entry in command_drill.list_leftovers(out):
            shutil.rmtree(entry)
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="trainmaster-drill-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for the attempt under way; the ones before it stay as lines. Without a terminal a line for each."""
    if quiet:
        yield lambda *_: None
        return
    if not _console.err.is_terminal:
        begun: set[str] = set()

        def tell(label: str, _done: int, total: int) -> None:
            if label not in begun:
                begun.add(label)
                _console.note(f"{label}: up to step {total}" if total > 1 else label)  # 1: not known yet

        yield tell
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns: list[Any] = [BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, TextColumn("{task.description}"), console=_console.err) as bar:
        tasks: dict[str, Any] = {}

        def say(label: str, done: int, total: int) -> None:
            if label not in tasks:
                for task in tasks.values():
                    bar.stop_task(task)
                tasks[label] = bar.add_task(_console.plain(label), total=total)
            bar.update(tasks[label], completed=done, total=max(done, total))

        yield say


def _show_plan(plan: DrillPlan) -> None:
    ranks = plan.attempts[0].ranks
    _console.err.print(
        f"[dim]{plan.config.steps} steps on {ranks} {'rank' if ranks == 1 else 'ranks'}, "
        f"a save every {plan.config.checkpoint.every_steps}, "
        f"seed {plan.seed}; changed for the drill: {_console.plain('; '.join(plan.changes) or 'nothing')}[/]",
        soft_wrap=True,
    )


def _name_option(word: str) -> str:
    """The name of an option as click compares it. A word that is none of drill's is most often one of a command that
    was written without `--`: click would only say that there is no such option."""
    known = {name.replace("_", "-") for name in inspect.signature(drill).parameters} | {"json", "help", "n", "h"}
    if word not in known:
        close = difflib.get_close_matches(word, known, n=1)
        meant = f"; did you mean --{close[0]}?" if close else "."
        raise typer.BadParameter(
            f"{'-' if len(word) == 1 else '--'}{word} is no option of drill{meant} For an option of your command put "
            "-- before the command: trainmaster drill -- torchrun --nproc-per-node 2 train.py"
        )
    return word


CONTEXT = {"token_normalize_func": _name_option}
