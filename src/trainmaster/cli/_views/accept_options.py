"""Options of `trainmaster accept`, as typer reads them: those of a run from their table, and the verb's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

Out = Annotated[Path, typer.Option(metavar="FILE", help="Where the result is written.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Strict = Annotated[bool, typer.Option("--strict", help="End with 1 on WARN too.")]

DryRun = Annotated[
    str | None,
    typer.Option(
        "--dry-run",
        metavar="FILE",
        help="Print this file of examples/; with --on kubernetes, sagemaker or slurm `plan`.",
    ),
]
Image = Annotated[str, typer.Option(help="With --dry-run: the image that is started.")]
Suite = Annotated[
    str | None,
    typer.Option(metavar="quick|full", help="Checks, bandwidth and training in one run, with one report to sign."),
]
On = Annotated[
    str | None, typer.Option("--on", metavar="TARGET", help="Nodes: {targets:accept}; local or without: this machine.")
]
Nodes = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Instances of the training job, with --on sagemaker; else 1.")
]
Expect = Annotated[
    list[str] | None, typer.Option(metavar="WORD", help="With --suite: what the checks expect, as `check --expect`.")
]
Only = Annotated[
    list[str] | None, typer.Option(metavar="CHECK", help="With --suite: only these checks; may be repeated.")
]
MinBusbw = Annotated[float | None, typer.Option(metavar="GB/S", help="With --suite: your own floor for collectives.")]


def with_table(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with the options of a run in place of its `**given`, before its own ones."""
    from trainmaster.bench.accept.options import table

    options = {}
    for row in table():
        # `Any`: the type is made here, so there is nothing for a type checker to read.
        kind: Any = row.kind | None if row.optional else row.kind
        annotation = Annotated[kind, typer.Option(f"--{row.name.replace('_', '-')}", **row.texts)]
        options[row.name] = inspect.Parameter(
            row.name, inspect.Parameter.KEYWORD_ONLY, default=row.default, annotation=annotation
        )
    own = dict(inspect.signature(verb, eval_str=True).parameters)
    del own["given"]
    beside_out = {"out": own.pop("out"), "log_dir": options.pop("log_dir")}
    every = {**options, **beside_out, **own}
    verb.__signature__ = inspect.Signature(list(every.values()))  # type: ignore[attr-defined]
    verb.__annotations__ = {name: parameter.annotation for name, parameter in every.items()}
    return verb
