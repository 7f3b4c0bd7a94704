"""`trainmaster check`: is this machine fit to train on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer


def check(
    level: Annotated[int, typer.Option(min=1, max=3, help="1 passive (seconds), 2 uses the GPU, 3 stress.")] = 1,
    expect: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="What the machine should have, for example gpus=8.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="CHECK", help="Run only these; may be repeated.")] = None,
    skip: Annotated[list[str] | None, typer.Option(metavar="CHECK", help="Leave these out; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write check.json and the evidence there.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="End with 1 on WARN too.")] = False,
    nagios: Annotated[bool, typer.Option("--nagios", help="End with 0, 1, 2 or 3 as Nagios reads them.")] = False,
    capture: Annotated[Path | None, typer.Option(metavar="DIR", help="Write down everything that was read.")] = None,
    replay: Annotated[Path | None, typer.Option(metavar="DIR", help="Judge a captured machine, not this one.")] = None,
) -> None:
    """Check this machine and give one verdict: PASS, WARN, FAIL or INCOMPLETE.

    What could not be measured is never a pass. Ends with 0 (PASS, WARN), 1 (FAIL), 2 (wrong usage), 3 (INCOMPLETE).

    [bold]Examples[/]

      trainmaster check

      trainmaster check --expect gpus=8 --expect gpu_model=H200 --expect driver=580

      trainmaster check --only disk_space --only shm --json

      trainmaster check --out evidence/     then, anywhere: trainmaster check --replay evidence/host
    """
    from trainmaster import checks
    from trainmaster.checks import _document
    from trainmaster.cli import _say
    from trainmaster.core.errors import UsageError
    from trainmaster.core.expect import parse_expect
    from trainmaster.core.results import CheckResult
    from trainmaster.node.recorded import open_host

    if out is not None and capture is not None:
        raise UsageError("--out captures into its folder already; leave --capture out")
    wanted = parse_expect(expect or [])
    chosen, left_out = _names(only), _names(skip)
    planned = checks.plan(level, chosen, left_out)  # before anything is written: a wrong name makes no folder
    host = open_host(replay=replay, capture=out / "host" if out is not None else capture)

    # Nobody sees a progress line in a file or a pipe.
    with _say.err.status("", spinner="dots") if sys.stdout.isatty() else _Quiet() as progress:

        def on_result(result: CheckResult) -> None:
            done = planned.index(result.check) + 1
            now = planned[done] if done < len(planned) else "verdict"
            progress.update(f"[dim]{done}/{len(planned)}[/] {now}")

        progress.update(f"[dim]0/{len(planned)}[/] {planned[0]}")
        document = _document.measure(
            host, wanted, level=level, only=chosen, skip=left_out, strict=strict, nagios=nagios, on_result=on_result
        )
    if out is not None:
        (out / "check.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if as_json:
        _say.as_json(document)
    else:
        _show(document)
    raise typer.Exit(int(document["exit_code"]))


class _Quiet:
    """A progress line that nobody reads."""

    def __enter__(self) -> _Quiet:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, status: str) -> None:
        pass


def _names(words: list[str] | None) -> list[str]:
    """`--only a --only b` and `--only a,b` are the same."""
    return [name.strip() for word in words or [] for name in word.split(",") if name.strip()]


def _show(document: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from trainmaster.checks import _document
    from trainmaster.cli import _say

    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("check", "device", "verdict", "reason", "what to do"):
        table.add_column(title, overflow="fold")
    for result in document["results"]:
        for finding in result["findings"]:
            table.add_row(
                result["check"],
                finding["device"] or "",
                _say.paint(finding["verdict"]),
                escape(finding["reason"]),
                escape(finding["action"] or ""),
            )
    _say.out.print(table)
    _say.out.print(f"{_say.paint(document['overall'])}  {escape(_document.count_line(document))}")
