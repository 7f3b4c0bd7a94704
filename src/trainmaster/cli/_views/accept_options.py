"""Options of `trainmaster accept`, as typer reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Option(help="resnet18, resnet50 or transformer.")]
DataMode = Annotated[
    str, typer.Option(help="synthetic (made on the device), fashion_mnist, cifar10, cifar100 or imagenet.")
]
DataDir = Annotated[
    str, typer.Option(metavar="DIR", help="Folder of data sets; missing ones are downloaded (not ImageNet).")
]
BatchSize = Annotated[int, typer.Option(help="Samples of each rank in a batch.")]
NumClasses = Annotated[int, typer.Option(help="Classes; of a transformer the vocabulary.")]
LearningRate = Annotated[float, typer.Option(help="Of SGD with momentum 0.9.")]
WarmupIterations = Annotated[int, typer.Option(help="Steps before the measurement.")]
ActiveIterations = Annotated[int, typer.Option(help="Measured steps.")]
Duration = Annotated[
    float | None, typer.Option(metavar="S", help="Seconds of measured steps, instead of their number.")
]
Repeats = Annotated[int, typer.Option(help="Measurements, one after the other.")]
Accumulate = Annotated[int, typer.Option(help="Batches per step; gradients are exchanged after the last.")]
ImageSize = Annotated[
    int | None, typer.Option(help="Height and width of an image; without: 224, or the size of the data.")
]
Workers = Annotated[int | None, typer.Option(help="Processes per rank that read data; without: as the data needs.")]
Precision = Annotated[str | None, typer.Option(help="fp32, tf32 or bf16; without: bf16 on GPUs, fp32 on CPUs.")]
ChannelsLast = Annotated[str, typer.Option(metavar="auto|on|off", help="Memory layout of images; auto: on GPUs.")]
Compile = Annotated[str, typer.Option("--compile", metavar="auto|on|off", help="torch.compile; auto: on GPUs.")]
Graph = Annotated[str, typer.Option(metavar="auto|on|off", help="One CUDA graph per step; auto: on GPUs.")]
BucketMb = Annotated[float, typer.Option(help="Megabytes of gradients that are summed at once.")]
Layers = Annotated[int, typer.Option(help="Of the transformer.")]
Width = Annotated[int, typer.Option(help="Of the transformer.")]
Heads = Annotated[int, typer.Option(help="Of the transformer.")]
Sequence = Annotated[int, typer.Option(help="Tokens of a sample of the transformer.")]
Backend = Annotated[
    str | None, typer.Option(envvar="BACKEND", help="nccl or gloo (CPUs); without: nccl where there are GPUs.")
]
Processes = Annotated[int | None, typer.Option(min=1, help="Ranks to start here; without: one per GPU, or one.")]
Timeout = Annotated[
    float | None,
    typer.Option(help="Seconds until a collective without answer ends the run; without: NCCL_TIMEOUT_MS, or 300."),
]
Baselines = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Golden runs of this site (`trainmaster baseline`); without: HOME's."),
]
MinThroughput = Annotated[
    float | None, typer.Option(metavar="SAMPLES/S", help="Your own floor for all ranks, instead of a baseline.")
]
Inject = Annotated[
    str | None,
    typer.Option(metavar="FAULT:RANK", help="Give a rank a fault (slow, flip, nan, exit) to see that it is found."),
]
Out = Annotated[Path, typer.Option(metavar="FILE", help="Where the result is written.")]
LogDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Logs of ranks and of NCCL; without: beside the result.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Strict = Annotated[bool, typer.Option("--strict", help="End with 1 on WARN too.")]

DryRun = Annotated[
    str | None,
    typer.Option(
        "--dry-run",
        metavar="FILE",
        help="Print this file of examples/; with --on kubernetes or sagemaker `plan`.",
    ),
]
Image = Annotated[str, typer.Option(help="With --dry-run: the image that is started.")]
Suite = Annotated[
    str | None,
    typer.Option(metavar="quick|full", help="Checks, bandwidth and training in one run, with one report to sign."),
]
On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="TARGET",
        help="Nodes: {targets:accept}; local or without: this machine.",
    ),
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
