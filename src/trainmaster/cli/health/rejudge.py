"""`trainmaster rejudge`: judge a captured evidence bundle again under today's rules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainmaster.cli._home import HomeOption, locate
from trainmaster.core.errors import UsageError


def rejudge(
    bundle: Annotated[Path, typer.Argument(metavar="DIR", help="What `trainmaster check --out DIR` wrote.")],
    expect: Annotated[
        list[str] | None, typer.Option(metavar="WORD", help="Expect this instead of what was expected then.")
    ] = None,
    sha256: Annotated[
        str | None, typer.Option(metavar="HEX", help="Digest that `check --out` printed; another one is INCOMPLETE.")
    ] = None,
    diff: Annotated[Path | None, typer.Option(metavar="OTHER", help="Show what changed since that run.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as verdict.json has it.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="End with 1 on WARN too, with 3 where faults could not be seen.")
    ] = False,
    nagios: Annotated[bool, typer.Option("--nagios", help="End with 0, 1, 2 or 3 as Nagios reads them.")] = False,
    home: HomeOption = None,
) -> None:
    """Judge a run again from its evidence, anywhere: no node is asked.

    Under the same version and expectations `--json` prints the bytes of DIR/verdict.json. Exit codes are those of
    `trainmaster check`.

    A bundle proves that its verdict follows from its captures, not that they are unchanged: compare the digest printed
    here with the one that `check --out` printed and recorded in its history, or state it with --sha256.

    [bold]Examples[/]

      trainmaster rejudge evidence/

      trainmaster rejudge evidence/ --expect driver=580 --expect gpus=8

      trainmaster rejudge today/ --diff yesterday/

      trainmaster rejudge evidence/ --sha256 9f86d081884c7d65…
    """
    from trainmaster.checks import document, profiles
    from trainmaster.cli import _console
    from trainmaster.cli._views import cluster_table
    from trainmaster.cli._views import diff as _diff
    from trainmaster.cli.health.check import read_words
    from trainmaster.cluster.health import diff as between
    from trainmaster.cluster.health import evidence
    from trainmaster.core.results import exit_code

    wanted = document.stated(profiles.resolve(read_words(expect or [])).expect)
    before = evidence.load(diff) if diff is not None else None
    health = evidence.rejudge(bundle, wanted, known_digest=sha256)
    _print_digest(evidence.digest(bundle), home)
    health = health.demanding() if strict else health
    if as_json and before is None:
        typer.echo(evidence.judged(health), nl=False)
    elif as_json and before is not None:
        _console.as_json({"health": health, "overall": health.overall, "diff": between.compare(before, health)})
    else:
        cluster_table.show(health)
        if before is not None:
            _diff.show(between.compare(before, health), since=str(diff))
    raise typer.Exit(exit_code(health.overall, strict=strict, nagios=nagios))


def _print_digest(digest: str, home: Path | None) -> None:
    """Print the digest of the bundle, and whether a run of this home wrote it."""
    from trainmaster.cli import _console
    from trainmaster.cluster.health import journal

    try:
        at = journal.find_bundle(locate(home), digest)
    except UsageError:
        at = None
    known = f"as recorded by the run of {at}" if at else "not in the history of this home"
    _console.err.print(f"evidence sha256:{digest} ({_console.plain(known)})", style="dim", soft_wrap=True)
