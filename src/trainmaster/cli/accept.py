"""`trainmaster accept`: train a known model on every GPU and judge speed, losses and bits."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from trainmaster.cli import _console
from trainmaster.core.errors import UsageError
from trainmaster.core.results import Overall, exit_code

if TYPE_CHECKING:
    from trainmaster.bench.accept.options import Options

_MARKS = {"pass": "green", "warn": "yellow", "fail": "red", "error": "red", "skip": "dim"}


def accept(
    model: Annotated[str, typer.Option(help="resnet18, resnet50 or transformer.")] = "resnet50",
    data_mode: Annotated[str, typer.Option(help="synthetic: made on the device.")] = "synthetic",
    data_dir: Annotated[str, typer.Option(metavar="DIR", help="Folder of data sets.")] = "./data",
    batch_size: Annotated[int, typer.Option(help="Samples of each rank in a step.")] = 32,
    num_classes: Annotated[int, typer.Option(help="Classes; of a transformer the vocabulary.")] = 1000,
    learning_rate: Annotated[float, typer.Option(help="Of SGD with momentum 0.9.")] = 0.01,
    warmup_iterations: Annotated[int, typer.Option(help="Steps before the measurement.")] = 50,
    active_iterations: Annotated[int, typer.Option(help="Measured steps.")] = 100,
    image_size: Annotated[int, typer.Option(help="Height and width of an image.")] = 224,
    precision: Annotated[
        str | None, typer.Option(help="fp32, tf32 or bf16; without: bf16 on GPUs, fp32 on CPUs.")
    ] = None,
    compile_: Annotated[
        str, typer.Option("--compile", metavar="auto|on|off", help="torch.compile; auto: on GPUs.")
    ] = "auto",
    graph: Annotated[str, typer.Option(metavar="auto|on|off", help="One CUDA graph per step; auto: on GPUs.")] = "auto",
    bucket_mb: Annotated[float, typer.Option(help="Megabytes of gradients that are summed at once.")] = 25.0,
    layers: Annotated[int, typer.Option(help="Of the transformer.")] = 12,
    width: Annotated[int, typer.Option(help="Of the transformer.")] = 768,
    heads: Annotated[int, typer.Option(help="Of the transformer.")] = 12,
    sequence: Annotated[int, typer.Option(help="Tokens of a sample of the transformer.")] = 512,
    backend: Annotated[
        str | None, typer.Option(envvar="BACKEND", help="nccl or gloo (CPUs); without: nccl where there are GPUs.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Ranks to start here; without: one per GPU, or one.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds until a collective without answer ends the run.")] = 300.0,
    min_throughput: Annotated[
        float | None, typer.Option(metavar="SAMPLES/S", help="Your own floor for all ranks, instead of a baseline.")
    ] = None,
    inject: Annotated[
        str | None,
        typer.Option(metavar="FAULT:RANK", help="Give a rank a fault (slow, flip, nan, exit) to see that it is found."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the result is written.")] = Path("results.json"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="End with 1 on WARN too.")] = False,
) -> None:
    """Accept a machine or a cluster by training: throughput, step times, stragglers, losses and equal bits.

    Starts one rank per GPU; under torchrun, srun or mpirun it takes part as one of them. Every rank must end with the
    same parameters, and compute the same gradients of one batch twice. Ends with 0 (PASS, WARN), 1 (FAIL), 2 (wrong
    usage), 3 (INCOMPLETE: also where no baseline is known; --min-throughput states your own).

    [bold]Examples[/]

      trainmaster accept

      trainmaster accept --model resnet18 --batch-size 128 --out acceptance/results.json

      srun -N4 --ntasks-per-node=8 trainmaster accept --batch-size 64

      trainmaster accept --processes 4 --image-size 64 --batch-size 8 --min-throughput 5 --inject slow:2:0.3
    """
    given = dict(locals())
    from trainmaster.bench.accept import run
    from trainmaster.bench.accept.results import save

    options = _options(given)
    document = run(options, env=os.environ, show=lambda text: _console.err.print(f"[dim]{escape(text)}[/]"))
    if document is None:
        return
    save(document, out)
    if as_json:
        _console.as_json(document)
    else:
        _show(document, out)
    raise typer.Exit(exit_code(Overall(document["overall"]), strict=strict))


def _options(given: Mapping[str, Any]) -> Options:
    """The options of a run from the words of the command line."""
    from trainmaster.bench.accept.options import Options, parse_fault

    words = {"precision": ("fp32", "tf32", "bf16"), "backend": ("nccl", "gloo")}
    for name, known in words.items():
        if given[name] is not None and given[name] not in known:
            raise UsageError(f"--{name} {given[name]}: one of {', '.join(known)}")
    other = {"compile": given["compile_"], "timeout_s": given["timeout"], "fault": parse_fault(given["inject"])}
    names = {field.name for field in dataclasses.fields(Options)} - set(other)
    return Options(**{name: given[name] for name in names}, **other).checked()


def _show(document: dict[str, Any], out: Path) -> None:
    say = _console.out.print
    for check in document["checks"]:
        for finding in check["findings"]:
            device = f"{finding['device']}: " if finding["device"] else ""
            mark = _MARKS[finding["verdict"]]
            say(f"[{mark}]{finding['verdict']:<5}[/] {check['check']:<18} {escape(device + finding['reason'])}")
            if finding["action"] and finding["verdict"] != "pass":
                say(f"      {'':<18} [dim]{escape(finding['action'])}[/]")
    if "throughput_samples_per_second" in document:
        share = document["communication_share"]
        exchange = f", {share:.0%} of a step is exchange" if share is not None else ""
        say(
            f"{document['throughput_samples_per_second']:,.1f} samples/s, "
            f"{document['average_step_time_seconds'] * 1e3:.2f} ms a step on {document['world_size']} × "
            f"{document['device']}{exchange}"
        )
    say(f"[bold]{document['overall']}[/]  {out}")
