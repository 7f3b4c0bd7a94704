"""`trainmaster plan`: will it fit, how fast, how long, how much. Arithmetic alone: no torch, no GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainmaster.cli import _console
from trainmaster.cli._documents import kind
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import Fault, SpecError, UsageError
from trainmaster.core.schema import build_new
from trainmaster.documents import yaml_file

if TYPE_CHECKING:
    from trainmaster.core.gpus import GpuModel
    from trainmaster.estimate import Cluster

_PER_NODE = 8  # where no instance says otherwise
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def plan(
    config: Annotated[Path, typer.Argument(help="The training config as YAML.")],
    values: Annotated[list[str] | None, typer.Argument(help="Values to put over the file's: key.path=value.")] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="GPUs in all; else those of the nodes, or 1.")
    ] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="GPU model, as H200 or as nvidia-smi prints it.")] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, help="Machines; else as many as 8 GPUs each need.")
    ] = None,
    instance: Annotated[
        str | None, typer.Option("--instance", help="Instance type: its GPUs, their number, its price.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", help="Tokens of the whole run, as 300B or 1T; else the config's steps.")
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            "--gpu-price", "--price", min=0, metavar="USD", help="Per hour of one GPU; else the instance's list price."
        ),
    ] = None,
    disk: Annotated[
        float | None, typer.Option("--disk", min=0.001, help="GB/s that checkpoints are written at, per node.")
    ] = None,
    power: Annotated[
        float | None, typer.Option("--power", min=1, help="Power limit of each GPU in watts; else the datasheet's.")
    ] = None,
    mttf: Annotated[float | None, typer.Option(min=0.001, help="Hours between failures; else Meta's rate.")] = None,
    restart: Annotated[float | None, typer.Option(min=0, help="Seconds from a failure to the next step.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
) -> None:
    """Say what a run will need before it is started: memory by part, speed, time and cost.

    Exit code 1 if it does not fit the GPUs that were named; what would fit is then said. A GPU without known figures
    is refused. How the figures are made, and how far to trust them: docs/how/plan.md.

    [bold]Examples[/]

      trainmaster plan llama.yaml --gpu H200

      trainmaster plan llama.yaml model.preset=llama3.1-8b --instance p5.48xlarge --nodes 4 --tokens 1T

      trainmaster plan llama.yaml parallel.recompute=full --gpu H100-SXM --gpus 16 --gpu-price 2.5 --json
    """
    from trainmaster.bench import bus_baselines
    from trainmaster.cli._views import plan_table
    from trainmaster.estimate import plan_report

    words = values or []
    document = yaml_file.load(config)
    kind.require_config(document, config)
    wanted = document.read(lambda value: build_new(TrainConfig, yaml_file.override(value, words)), words)
    machine = _machine(instance)
    model = _model(gpu, machine.gpu if machine is not None else None)
    cluster = replace(_cluster(model, gpus=gpus, nodes=nodes, machine=machine), power_w=power)
    _must_divide(wanted, cluster)
    answer = plan_report.build(
        wanted,
        cluster,
        find_bus=bus_baselines.find,
        words=[str(config), *words],
        tokens=_count(tokens),
        usd_per_gpu_hour=price if price is not None else _list_price(machine),
        instance=machine.name if machine is not None else None,
        disk_gbps=disk,
        mttf_h=mttf,
        restart_s=restart,
    )
    if json:
        _console.as_json(answer)
    else:
        plan_table.show(answer)
    if answer["fits"] is False:
        raise typer.Exit(1)


def _machine(name: str | None) -> Any:
    from trainmaster.checks import profiles

    if name is None:
        return None
    instance = profiles.find_instance(name)
    if instance is None:
        raise UsageError(f"--instance {name}: not known here; {_near(name, list(profiles.instances()))}")
    return instance


def _model(named: str | None, of_instance: str | None) -> GpuModel | None:
    from trainmaster.core import gpus

    name = named or of_instance
    if name is None:
        return None
    gpu = gpus.find_gpu(name)
    if gpu is None:
        raise UsageError(
            f"--gpu {name}: nothing is known of it, so nothing is guessed; {_near(name, list(gpus.gpus()))}"
        )
    if of_instance is not None and gpu.name != of_instance:
        raise UsageError(f"--gpu {name}: the instance has {of_instance}; leave one of them out")
    return gpu


def _cluster(model: GpuModel | None, *, gpus: int | None, nodes: int | None, machine: Any) -> Cluster:
    """As many GPUs as were asked for, spread evenly over the machines."""
    from trainmaster.bench import bus_baselines as _bus
    from trainmaster.estimate import Cluster

    each = machine.gpus if machine is not None else None
    if gpus is None:
        gpus = (nodes or 1) * (each or (_PER_NODE if nodes else 1))
    if nodes is None:
        nodes = -(-gpus // (each or _PER_NODE))
    if gpus % nodes:
        raise UsageError(f"--gpus {gpus}: does not divide by {nodes} nodes; use {max(1, round(gpus / nodes)) * nodes}")
    if each is not None and gpus // nodes > each:
        raise UsageError(f"--gpus {gpus}: {machine.name} has {each}, so {nodes} of them have {nodes * each}")
    fabric = "efa" if machine is not None and nodes > 1 else None
    bus = _bus.find(model, nodes=nodes, fabric=fabric) if model is not None and gpus > 1 else None
    return Cluster(gpu=model, gpus=gpus, gpus_per_node=gpus // nodes, bus_gbps=bus.gbps if bus is not None else None)


def _must_divide(config: TrainConfig, cluster: Cluster) -> None:
    from trainmaster.estimate import faults_on

    faults = list(faults_on(config, ranks=cluster.gpus, ranks_per_node=cluster.gpus_per_node))
    if faults:
        raise SpecError(Fault(path=fault.path, message=f"{fault.message} (on {cluster.gpus} GPUs)") for fault in faults)


def _count(text: str | None) -> int | None:
    """`1T` is 10¹² tokens, as people count them; `1e12` and `1_000_000` will do."""
    if text is None:
        return None
    match = re.fullmatch(r"([\d_]+(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([KMBT]?)", text.strip(), flags=re.IGNORECASE)
    count = round(float(match[1].replace("_", "")) * _UNITS[match[2].upper()]) if match and match[1].strip("_") else 0
    if not 1 <= count <= 10**18:
        raise UsageError(f"--tokens {text}: write it as 20M, 300B or 1T")
    return count


def _list_price(machine: Any) -> float | None:
    if machine is None or machine.usd_per_hour is None:
        return None
    each: float = machine.usd_per_hour / machine.gpus
    return each


def _near(word: str, known: Sequence[str]) -> str:
    import difflib

    begun = [name for name in known if name.lower().startswith(f"{word.lower()}-")]
    if begun:  # H100 is three products with three speeds
        return f"did you mean {' or '.join(begun)}?"
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.5)
    return f"did you mean {lower[close[0]]}?" if close else f"known: {', '.join(known)}"
