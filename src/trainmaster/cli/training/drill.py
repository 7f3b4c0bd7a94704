"""`trainmaster drill`: kill it, damage it, resume it, prove it. The proof is a table, a verdict and a report."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainmaster.cli import _console
from trainmaster.cli._documents import kind
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import MissingExtra, SpecError, UsageError
from trainmaster.core.results import exit_code
from trainmaster.core.schema import build_new
from trainmaster.documents import yaml_file

if TYPE_CHECKING:
    from trainmaster.train.drill.plan import DrillPlan


def drill(
    config: Annotated[Path, typer.Argument(help="The training config as YAML.")],
    values: Annotated[list[str] | None, typer.Argument(help="Values to put over the file's: key.path=value.")] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", "-n", min=1, help="Ranks; without: one per GPU, or two on CPUs.")
    ] = None,
    other: Annotated[
        int | None,
        typer.Option(min=0, help="Ranks of the last resume; without: half as many. 0 leaves it out, as one GPU does."),
    ] = None,
    kills: Annotated[int, typer.Option(min=1, max=20, help="How often the run is killed.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Of the kills: the same seed kills at the same places.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the report, and every attempt's logs and events.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Prove that a run is never lost: train, kill ranks with SIGKILL, damage a checkpoint, resume, compare.

    First the run is trained undisturbed, short: 40 steps and eight saves unless you state `steps=` and
    `checkpoint.every_steps=`; what is changed is printed. Then the same run is killed again and again at places drawn
    from the seed, the newest checkpoint gets a flipped bit, and the last resume is on another number of ranks. Shown
    for each kill: what was lost, and from where it went on. Asked of the whole: losses bit-equal to the undisturbed
    run's (within 0.001 on another number of ranks), every sample consumed once and in order, never more lost than
    stated, never a silent start at step 0.

    Checkpoints go to a folder of the drill's own: your runs are not touched. Ends with 0 (PASS), 1 (FAIL), 2 (wrong
    usage), 3 (INCOMPLETE: something planned was not reached).

    [bold]Examples[/]

      trainmaster drill llama.yaml

      trainmaster drill llama.yaml --kills 8 --seed 7 --out proof/

      trainmaster drill llama.yaml steps=200 checkpoint.every_steps=10 --processes 8 --other 6

      trainmaster drill llama.yaml device=cpu --json
    """
    words = values or []
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
    if out is not None and out.exists() and any(out.iterdir()):
        raise UsageError(f"--out {out}: not empty; name a new folder")

    from trainmaster.cli._views import drill_proof
    from trainmaster.train.drill import plan as plans
    from trainmaster.train.drill.run import Drill

    given = {word.partition("=")[0] for word in words}
    plan = plans.make(wanted, processes=ranks, other=other, kills=kills, seed=seed, limit=limit, given=given)
    if not as_json:
        _show_plan(plan)
    with _interruptible(), _folder(out) as folder, _progress(quiet=as_json) as say:
        proof = Drill(plan, folder.absolute(), say).run()
        if out is not None:
            drill_proof.save(proof, out)
    if as_json:
        _console.as_json(drill_proof.document(proof))
    else:
        drill_proof.show(proof)
        if out is not None:
            _console.note(f"report in {out}")
    raise typer.Exit(exit_code(proof.overall))


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
def _interruptible() -> Iterator[None]:
    """SIGTERM ends a drill as Ctrl-C does, once: nothing of it runs on, and nothing stays in memory or in /tmp."""
    from trainmaster.cluster.termination import until_terminated

    with until_terminated():
        yield


@contextlib.contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
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
                _console.note(f"{label}: {total} steps")

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
            bar.update(tasks[label], completed=done)

        yield say


def _show_plan(plan: DrillPlan) -> None:
    ranks = plan.attempts[0].ranks
    _console.err.print(
        f"[dim]{plan.config.steps} steps on {ranks} {'rank' if ranks == 1 else 'ranks'}, "
        f"a save every {plan.config.checkpoint.every_steps}, "
        f"seed {plan.seed}; changed for the drill: {_console.plain('; '.join(plan.changes) or 'nothing')}[/]",
        soft_wrap=True,
    )
