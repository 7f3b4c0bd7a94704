"""`trainmaster baseline`: golden runs of a site, and later runs against them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption, locate
from trainmaster.core.errors import UsageError

FileOption = Annotated[
    Path | None, typer.Option("--file", metavar="FILE", help="TOML file of golden runs; without: HOME/baselines.toml.")
]
ResultsArgument = Annotated[Path, typer.Argument(metavar="RESULTS", help="results.json of `trainmaster accept`.")]

baseline = typer.Typer(
    no_args_is_help=True,
    help="""Keep golden runs of this site, and compare later acceptance runs with them.

    `trainmaster accept` compares by itself: its check accept_regression names each figure and each GPU that got worse.

    [bold]Examples[/]

      trainmaster baseline record results.json --name rack-7

      trainmaster baseline compare tonight/results.json

      trainmaster baseline list
    """,
)


@baseline.command()
def record(
    results: ResultsArgument,
    name: Annotated[str, typer.Option(help="Of the golden run, for reports.")] = "golden",
    file: FileOption = None,
    home: HomeOption = None,
) -> None:
    """Keep a run as golden: later runs of the same configuration are compared with the newest one."""
    from trainmaster.bench.accept.baselines import append, golden_of

    place = file or locate(home) / "baselines.toml"
    golden = golden_of(read_results(results), name=name)
    append(place, golden)
    _console.out.print(f"{golden.samples_per_s:,.1f} samples/s recorded in {escape(str(place))}", soft_wrap=True)


@baseline.command()
def compare(
    results: ResultsArgument,
    file: FileOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    home: HomeOption = None,
) -> None:
    """Compare a run with the newest golden run of its configuration. Exit code 1: worse; 3: there is none."""
    from trainmaster.bench.accept import baselines

    place = file or locate(home) / "baselines.toml"
    now = baselines.figures_of(read_results(results), name="this run")
    golden = baselines.newest(baselines.load_golden(place), now.key)
    if golden is None:
        raise _Missing(f"{place}: no golden run with the configuration of {results}; record one first")
    worse = baselines.compare(golden, now)
    if as_json:
        losses = [{"figure": figure, "loss": round(loss, 4)} for figure, loss in worse]
        share = now.samples_per_s / golden.samples_per_s
        _console.as_json({"golden": golden.source, "throughput_share": share, "worse": losses})
    else:
        for figure, loss in worse:
            mark = "[red]fail[/]" if loss > 1 - baselines.FAIL_BELOW else "[yellow]warn[/]"
            _console.out.print(f"{mark} {escape(figure)}: {loss:.0%} worse than in the {escape(golden.source)}")
        if not worse:
            share = now.samples_per_s / golden.samples_per_s
            _console.out.print(f"[green]pass[/] {share:.1%} of the throughput of the {escape(golden.source)}")
    raise typer.Exit(1 if any(loss > 1 - baselines.FAIL_BELOW for _, loss in worse) else 0)


@baseline.command("list")
def list_(
    file: FileOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    home: HomeOption = None,
) -> None:
    """List the golden runs, oldest first."""
    from trainmaster.bench.accept.baselines import load_golden

    runs = load_golden(file or locate(home) / "baselines.toml")
    if as_json:
        _console.as_json({"golden": runs})
        return
    if not runs:
        _console.note("no golden run is recorded; `trainmaster baseline record results.json` adds one")
    for run in runs:
        key = run.key
        what = f"{key['model']} batch {key['batch_size']} {key['precision']} on {key['world_size']}× {key['device']}"
        _console.out.print(f"{run.recorded_at[:10]}  {escape(run.name)}  {escape(what)}  {run.samples_per_s:,.1f}/s")


class _Missing(UsageError):
    """Nothing to compare with: not measured is not a pass."""

    exit_code = 3


def read_results(path: Path) -> Mapping[str, Any]:
    """A results.json; UsageError with its name where it is none."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(results, dict) or results.get("v") != 1 or "overall" not in results:
            raise UsageError(f"{path}: not a results.json of `trainmaster accept`")
        return results
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UsageError(f"{path}: not a results.json of `trainmaster accept`: {error}") from None
