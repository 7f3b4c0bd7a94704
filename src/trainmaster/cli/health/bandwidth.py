"""`trainmaster bandwidth`: how fast ranks talk to each other, whether the data arrives right, and by which way."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.markup import escape

from trainmaster.cli import _console
from trainmaster.cli._documents.hosts_file import elsewhere
from trainmaster.cli._home import locate_default
from trainmaster.core.errors import UsageError
from trainmaster.core.results import CheckResult, exit_code, judge_overall

if TYPE_CHECKING:
    from trainmaster.bench.collectives import Report, Row, Sweep
    from trainmaster.bench.collectives.transport import Expected

_HEAD = f"{'collective':<15}{'size':>10}{'rounds':>8}{'time':>12}{'algbw':>11}{'busbw':>11}{'median':>12}{'p95':>12}"
_UNITS = f"{'':<15}{'':>10}{'':>8}{'µs':>12}{'GB/s':>11}{'GB/s':>11}{'µs':>12}{'µs':>12}"


def bandwidth(
    collective: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="all_reduce, all_gather, …; may be repeated. Without: all.")
    ] = None,
    min_size: Annotated[str, typer.Option("--min", "--min-size", metavar="SIZE", help="Smallest message.")] = "8K",
    max_size: Annotated[
        str | None,
        typer.Option("--max", "--max-size", metavar="SIZE", help="Largest; without: 8G on NCCL, 64M on gloo."),
    ] = None,
    factor: Annotated[int, typer.Option(min=2, help="From one size to the next.")] = 2,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Ranks to start here; without: one per GPU, or two on CPUs.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="nccl or gloo; without: nccl where there are GPUs.")] = None,
    expect_transport: Annotated[
        str | None, typer.Option(metavar="NAME", help="Required: EFA, IB, gIB, FasTrak, NVLS, P2P or Socket.")
    ] = None,
    min_busbw: Annotated[
        float | None, typer.Option(metavar="GB/S", help="Your own floor for the largest size, instead of a baseline.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds without progress until the missing rank is named.")] = 60.0,
    nccl_tests: Annotated[
        str | None,
        typer.Option(metavar="FILE|run", help="Judge the output of NVIDIA's nccl-tests, or run them where installed."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="With --nccl-tests: how many ranks must have met in one run.")
    ] = None,
    on: Annotated[str | None, typer.Option("--on", metavar="TARGET", help="Nodes: {targets:bandwidth}.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep bandwidth.json and every rank's log.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="End with 1 on WARN too.")] = False,
) -> None:
    """Measure collectives between ranks, verify every element, prove the transport, compare with sourced baselines.

    Starts the ranks itself, here or with --on on the nodes of a target, where --processes counts those of each node;
    under torchrun, srun or mpirun it takes part as one of them. A rank that dies or stops is named. Ends with 0 (PASS,
    WARN), 1 (FAIL), 2 (wrong usage), 3 (INCOMPLETE: also without a baseline; --min-busbw states your own).

    [bold]Examples[/]

      trainmaster bandwidth

      trainmaster bandwidth --collective all_reduce --max 1G --expect-transport NVLS

      trainmaster bandwidth --on ssh:hosts.yaml --max 1G          or: --on slurm

      srun -N2 --ntasks-per-node=8 trainmaster bandwidth --expect-transport IB --out evidence/

      trainmaster bandwidth --processes 4 --backend gloo --max 1M --min-busbw 0.01

      trainmaster bandwidth --nccl-tests all_reduce.log --ranks 16
    """
    from trainmaster.bench import limits
    from trainmaster.bench.collectives import Sweep
    from trainmaster.bench.collectives.sweep import parse_collectives
    from trainmaster.bench.collectives.transport import parse_expected

    _refuse_floor(min_busbw)
    names, wanted = parse_collectives(collective or []), parse_expected(expect_transport)
    on = elsewhere(on)
    if nccl_tests is not None:
        if on is not None:
            raise UsageError(
                "--on starts ranks of our own: leave --nccl-tests out, or run nccl-tests with your scheduler"
            )
        result = _nccl_tests(nccl_tests, names if collective else (), max_size, ranks, min_busbw, wanted)
        _end(result, as_json=as_json, strict=strict)
    if backend not in (None, "nccl", "gloo"):
        raise UsageError(f"--backend {backend}: nccl or gloo")
    sweep = Sweep(
        collectives=names, min_bytes=limits.parse_size(min_size), factor=factor, processes=processes, timeout_s=timeout,
        max_bytes=limits.parse_size(max_size) if max_size is not None else None, backend=backend,  # type: ignore[arg-type]
    )  # fmt: skip
    measure = partial(_measure, expected=wanted) if on is None else partial(_measure_nodes, on, stated=expect_transport)
    measure(sweep, out=out, least_gbps=min_busbw, as_json=as_json, strict=strict)


def _refuse_floor(least_gbps: float | None) -> None:
    """UsageError for a floor that every measurement meets (0, negative) or that compares with none (nan, inf)."""
    if least_gbps is not None and not (math.isfinite(least_gbps) and least_gbps > 0):
        raise UsageError(f"--min-busbw {least_gbps:g}: write a number of GB/s above 0")


def _measure(
    sweep: Sweep, *, out: Path | None, expected: Expected | None, least_gbps: float | None, as_json: bool, strict: bool
) -> NoReturn:
    """Run the sweep on every rank, print and save its report, and exit with its verdict."""
    from trainmaster.bench.collectives.run_sweep import document, run_sweep, save
    from trainmaster.node.ranks import detect

    show = _Table(quiet=as_json)
    if detect(os.environ).launcher == "single":  # of the ranks of another launcher, each would print it
        _console.note("starting the ranks; torch is loaded first")
    outcome = run_sweep(sweep, env=os.environ, out=out, expected=expected, least_gbps=least_gbps, on_row=show.row)
    if isinstance(outcome, int):
        _leave(outcome)
    if out is not None:
        save(outcome, out)
    if as_json:
        _console.as_json(document(outcome))
    else:
        _show(outcome)
    code = exit_code(outcome.overall, strict=strict)
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ:
        _leave(code)
    raise typer.Exit(code)


def _measure_nodes(
    on: str,
    sweep: Sweep,
    *,
    out: Path | None,
    stated: str | None,
    least_gbps: float | None,
    as_json: bool,
    strict: bool,
) -> NoReturn:
    """Run the sweep on every node of a target, print and save its report, and exit with its verdict."""
    from trainmaster.bench.collectives.run_sweep import document, save
    from trainmaster.cli._documents.hosts_file import load_nodes
    from trainmaster.cluster.collectives.bandwidth import Request, measure

    words = [word for name in sweep.collectives for word in ("--collective", name)]
    words += ["--min", str(sweep.min_bytes), "--factor", str(sweep.factor), "--timeout", f"{sweep.timeout_s:g}"]
    words += ["--max", str(sweep.max_bytes)] if sweep.max_bytes is not None else []
    words += ["--expect-transport", stated] if stated is not None else []
    words += ["--min-busbw", f"{least_gbps:g}"] if least_gbps is not None else []
    nodes = load_nodes(on, verb="bandwidth")
    # What is set here for NCCL is meant for the ranks: nodes have an environment of their own.
    env = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    request = Request(words=words, backend=sweep.backend, processes=sweep.processes, env=env)
    started = "the ranks start on every node; the rows follow when all have ended"
    outcome = measure(nodes, request, home=locate_default(), out=out, on_nodes=lambda _: _console.note(started))
    if out is not None and outcome.report is not None:
        save(outcome.report, out)
    code = exit_code(outcome.overall, strict=strict)
    if as_json:
        report = document(outcome.report) if outcome.report is not None else {"rows": outcome.rows}
        judged = {"results": outcome.results, "overall": outcome.overall, "exit_code": code}
        _console.as_json({**report, "on": on, "silent": outcome.silent, **judged})
        raise typer.Exit(code)
    show = _Table(quiet=False)
    for row in outcome.rows:
        show.row(row)
    if outcome.report is not None:
        many = f"{outcome.report.world} ranks on {outcome.report.nodes} nodes"
        _console.out.print(f"\n{many}, {outcome.report.backend}: {escape(outcome.report.transport)}", soft_wrap=True)
    _findings(outcome.results)
    _console.out.print(f"{_console.paint(outcome.overall)}  {len(outcome.rows)} rows", soft_wrap=True)
    raise typer.Exit(code)


def _leave(code: int) -> NoReturn:
    """End at once: after a loss a thread of this process is still in its collective."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Table:
    """Rows, printed as they come: a sweep takes minutes, and the first ones often say enough."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet, self._last = quiet, ""

    def row(self, row: Row) -> None:
        from trainmaster.bench.limits import render_size

        if self._quiet:
            if row.collective != self._last:
                self._last = row.collective
                _console.note(f"measuring {row.collective}")
            return
        if not self._last:
            _console.out.print(f"[dim]{_HEAD}\n{_UNITS}[/]", soft_wrap=True)
        name, self._last = (row.collective if row.collective != self._last else ""), row.collective
        mismatches = f"  [bold red]{sum(item.count for item in row.wrong):,} wrong[/]" if row.wrong else ""
        _console.out.print(
            f"{name:<15}{render_size(row.size_bytes):>10}{row.repeats:>8}{row.time_us:>12.1f}{row.algbw_gbps:>11.3f}"
            f"[bold]{row.busbw_gbps:>11.3f}[/]{row.median_us:>12.1f}{row.p95_us:>12.1f}{mismatches}",
            soft_wrap=True,
        )


def _show(report: Report) -> None:
    many = f"{report.world} ranks on {report.nodes} node{'s' if report.nodes > 1 else ''}"
    _console.out.print(f"\n{many}, {report.backend}: {escape(report.transport)}", soft_wrap=True)
    for note in report.notes:
        _console.out.print(f"[yellow]note[/] {escape(note)}", soft_wrap=True)
    _findings(report.results)
    _console.out.print(
        f"{_console.paint(report.overall)}  {len(report.rows)} rows in {report.took_s:.1f} s", soft_wrap=True
    )


def _findings(results: Iterable[CheckResult]) -> None:
    for result in results:
        for finding in result.findings:
            to_do = f"  [dim]→ {escape(finding.action)}[/]" if finding.action else ""
            _console.out.print(
                f"{_console.paint(finding.verdict, width=6)} {escape(finding.reason)}{to_do}", soft_wrap=True
            )


def _nccl_tests(
    path: str, named: Sequence[str], max_size: str | None, ranks: int | None, least_gbps: float | None,
    expected: Expected | None,
) -> CheckResult:  # fmt: skip
    """Judge a file of nccl-tests, or run them."""
    from trainmaster.bench import nccl_tests
    from trainmaster.node.host import Host

    if path == "run":
        largest, names = max_size or "8G", named or ("all_reduce",)
        return nccl_tests.run(Host(), names, max_size=largest, least_gbps=least_gbps)
    stated = named[0] if len(named) == 1 else None
    return nccl_tests.judge(_read(path), ranks=ranks, least_gbps=least_gbps, expected=expected, collective=stated)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"--nccl-tests {path}: cannot be read ({error.strerror}); give a file, or `run`") from None


def _end(result: CheckResult, *, as_json: bool, strict: bool) -> NoReturn:
    overall = judge_overall([result], planned=[result.check])
    code = exit_code(overall, strict=strict)
    if as_json:
        _console.as_json({"results": [result], "overall": overall, "exit_code": code})
    else:
        _findings([result])
        _console.out.print(_console.paint(overall))
    raise typer.Exit(code)
