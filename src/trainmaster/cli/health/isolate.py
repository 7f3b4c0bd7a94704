"""`trainmaster isolate`: which node, link or switch is bad."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from trainmaster.cli import _console
from trainmaster.cli._home import locate_default
from trainmaster.core.errors import UsageError
from trainmaster.core.results import Overall, exit_code

if TYPE_CHECKING:
    from trainmaster.bench.isolate import Diagnosis, RoundReport, Suspect

_SEED = 1  # of the pairings: the same nodes are paired in the same way again
_SHOWN = 3  # measurements printed of each suspect; --json has them all


def isolate(
    on: Annotated[str | None, typer.Option("--on", metavar="TARGET", help="Nodes to test: {targets:isolate}.")] = None,
    sim: Annotated[str | None, typer.Option("--sim", help="A simulated fabric, as key=value words.")] = None,
    routes: Annotated[bool, typer.Option("--routes", help="The path of every pair is known: name the link.")] = False,
    rounds: Annotated[int, typer.Option("--rounds", "--max-rounds", min=1, max=100, help="Maximum rounds.")] = 12,
    expect: Annotated[float | None, typer.Option("--expect", help="GB/s of a healthy pair; else from peers.")] = None,
    expect_cross: Annotated[
        float | None, typer.Option("--expect-cross", help="The same between racks, where it differs.")
    ] = None,
    size: Annotated[str, typer.Option(help="Message of a pair test, with --on.")] = "64M",
    timeout: Annotated[float, typer.Option(min=4.0, metavar="S", help="Of one round, with --on.")] = 120.0,
    json: Annotated[bool, typer.Option("--json", help="Print the diagnosis as JSON.")] = False,
) -> None:
    """Find the bad node, link or switch by rounds of pair tests: pair, swap, cross racks.

    Exit code 0: every part is cleared. 1: a bad part is named. 3: the tests cannot say.

    Words of --sim: nodes, racks, spines, gbps, noise, seed, glitch, spread, uplink_flows, and any number of
    fault=KIND:NAME:LOSS with KIND node, dead, link, leaf, leaf-all, spine or pair.

    [bold]Examples[/]

      trainmaster isolate --on ssh:hosts.yaml --max-rounds 8          or: --on slurm

      trainmaster isolate --sim "nodes=256,racks=16,fault=node:n017:0.5,seed=3"

      trainmaster isolate --sim "nodes=256,racks=16,fault=link:leaf05-spine3:0.5" --routes --json
    """
    if on is not None:
        if sim is not None or routes:
            raise UsageError("--on tests real nodes, whose routes are unknown: leave --sim and --routes out")
        diagnosis, silent = _on_nodes(
            on, rounds=rounds, expect=expect, expect_cross=expect_cross, size=size, timeout_s=timeout
        )
        # A part that was not tested is never cleared, and hides no part that is bad.
        verdict = (
            Overall.INCOMPLETE
            if diagnosis is None or (silent and diagnosis.verdict is not Overall.FAIL)
            else diagnosis.verdict
        )
        if json:
            _console.as_json({"on": on, "silent": silent, "verdict": verdict, "diagnosis": diagnosis})
        else:
            _print(diagnosis, how="on real nodes", silent=silent, verdict=verdict)
        raise typer.Exit(exit_code(verdict))
    if sim is None:
        raise UsageError(
            "nothing to test; give nodes, --on ssh:hosts.yaml or --on slurm, or a fabric, for example "
            '--sim "nodes=256,racks=16,fault=node:n017:0.5"'
        )
    from trainmaster.bench.isolate import isolate as find
    from trainmaster.sim.fabric import Fabric, parse

    fabric = Fabric(parse(sim))
    _console.err.print(f"[bold yellow]SIMULATED[/] fabric of {len(fabric.nodes)} nodes: no machine is tested")
    diagnosis = find(
        fabric.nodes,
        fabric.racks,
        fabric.measure,
        seed=fabric.shape.seed,
        max_rounds=rounds,
        expected_gbps=expect,
        expected_cross_gbps=expect_cross,
        route=fabric.route if routes else None,
        progress=_progress,
    )
    if json:
        _console.as_json({"simulated": sim, "diagnosis": diagnosis})
    else:
        _print(diagnosis, how="simulated", silent={}, verdict=diagnosis.verdict)
    raise typer.Exit(exit_code(diagnosis.verdict))


def _on_nodes(
    on: str, *, rounds: int, expect: float | None, expect_cross: float | None, size: str, timeout_s: float
) -> tuple[Diagnosis | None, Mapping[str, str]]:
    """The diagnosis of the nodes that answered, None where they make no pair; and why the others did not."""
    from trainmaster.bench.isolate import isolate as find
    from trainmaster.bench.limits import parse_size
    from trainmaster.cli._documents.hosts_file import load_nodes
    from trainmaster.cluster.collectives.pairs import Pairs

    parse_size(size)  # a bad size is refused here, once
    nodes = load_nodes(on, verb="isolate")
    pairs = Pairs(nodes, home=locate_default(), size=size, timeout_s=timeout_s, rounds=rounds)
    try:
        if len(pairs.nodes) < 2 and pairs.silent:
            return None, pairs.silent
        _console.note(f"{len(pairs.nodes)} nodes, {pairs.backend}, {size} between each pair")
        diagnosis = find(
            pairs.nodes,
            pairs.racks,
            pairs.measure,
            seed=_SEED,
            max_rounds=rounds,
            expected_gbps=expect,
            expected_cross_gbps=expect_cross,
            progress=_progress,
        )
    finally:
        pairs.close()
    return diagnosis, pairs.silent


def _progress(report: RoundReport) -> None:
    leading = "; ".join(f"{s.words} {_sure(s)}" for s in report.leading[:3]) or "no suspect"
    more = f" and {len(report.leading) - 3} more" if len(report.leading) > 3 else ""
    slow = f"{report.slow} of {report.pairs} slow"
    _console.err.print(
        f"[dim]round {report.number:>2}[/] {report.purpose}: {slow}; {escape(leading)}{more}", soft_wrap=True
    )


def _print(diagnosis: Diagnosis | None, *, how: str, silent: Mapping[str, str], verdict: Overall) -> None:
    say = partial(_console.out.print, soft_wrap=True)
    done = (
        f"{diagnosis.rounds} rounds, {diagnosis.measurements} pair tests" if diagnosis is not None else "no test at all"
    )
    say(f"\n{_console.paint(verdict)} after {done} ({how})")
    for name, reason in silent.items():
        say(f"[bold magenta]silent[/] [bold]{escape(name)}[/], not tested: {escape(reason)}")
    if diagnosis is None:
        say("to do: have two nodes answer, at least")
        return
    for suspect in diagnosis.suspects:
        say(f"[bold red]bad[/] {_describe(suspect)}")
        _evidence(suspect)
    for group in diagnosis.candidates:
        say("[bold magenta]the fault is among these[/], and the tests do not say where:")
        for suspect in group:
            say(f"  {_describe(suspect)}")
        _evidence(group[0])
    for note in diagnosis.notes:
        say(f"[yellow]note[/] {escape(note)}")
    left = (
        f", {len(diagnosis.not_cleared)} not: {', '.join(diagnosis.not_cleared[:5])}" if diagnosis.not_cleared else ""
    )
    say(f"cleared {diagnosis.cleared} parts{escape(left)}{' …' if len(diagnosis.not_cleared) > 5 else ''}")
    were = "pair was" if diagnosis.pairs == 1 else "pairs were"
    tested = f"{diagnosis.pairs_tested:,} of {diagnosis.pairs:,} {were} tested"
    say(f"[dim]{tested}; the path of a single pair shows in no other[/]")
    if diagnosis.healthy_gbps is not None and diagnosis.noise is not None:
        say(f"a healthy pair gives {diagnosis.healthy_gbps:.1f} GB/s ± {diagnosis.noise:.0%}")
    say(f"to do: {escape(diagnosis.action)}")


def _describe(suspect: Suspect) -> str:
    harm = f"loses {suspect.loss:.0%}" if suspect.loss is not None else "does not answer"
    tests = f"{suspect.slow} slow of {suspect.measured} tests through it"
    return f"[bold]{escape(suspect.words)}[/]: {harm}, confidence {_sure(suspect)} ({tests})"


def _sure(suspect: Suspect) -> str:
    """A posterior is never 1; what rounds to it is shown as a bound."""
    return "over 99.9%" if suspect.confidence > 0.999 else f"{suspect.confidence:.1%}"


def _evidence(suspect: Suspect) -> None:
    for m in suspect.evidence[:_SHOWN]:
        gave = f"{m.gbps:.1f} GB/s" if m.gbps is not None else "no answer"
        line = f"round {m.round}: {m.a} with {m.b} {gave}, a healthy pair {m.healthy_gbps:.1f}"
        _console.out.print(f"    [dim]{escape(line)}[/]", soft_wrap=True)
