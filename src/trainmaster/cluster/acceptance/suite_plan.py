"""Parts of an acceptance suite: which measurements belong to it on these machines."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trainmaster import targets
from trainmaster.bench.accept.options import Model, Options, words
from trainmaster.cluster.acceptance.suite import Part
from trainmaster.cluster.collectives import launch
from trainmaster.cluster.termination import run
from trainmaster.targets import ReachesNodes

Suite = Literal["quick", "full"]
# Forces NCCL from NVLink and shared memory onto the network, with the algorithm that every fabric has.
FORCED_NETWORK = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_ALGO": "Ring"}
# Batches per GPU that keep a modern GPU busy, and for which there are published figures.
_BATCH: dict[Model, int] = {"resnet18": 128, "resnet50": 64, "transformer": 32}
_MODELS: dict[Suite, tuple[Model, ...]] = {"quick": ("resnet18",), "full": ("resnet18", "resnet50", "transformer")}
LEVEL = {"quick": 1, "full": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the suite runs on."""

    on: str | None  # a target of several nodes; None: this machine
    gpus: int | None  # that torch sees here, or that the nodes have; None: not known, and taken to be there
    nodes: int | None = None  # of the target, where they were asked

    def name(self, host: str) -> str:
        """What the suite measures: results of another machine, or of another list of hosts, are not taken over."""
        if self.on is None:
            return f"{host} with {self.gpus} GPUs"
        kind, _, file = self.on.partition(":")
        text = Path(file).read_bytes() if file and Path(file).is_file() else b""
        return f"{kind} {hashlib.sha256(text).hexdigest()[:12]}" if text else self.on


def ask_nodes(target: ReachesNodes, on: str, *, home: Path, expects_gpus: bool = False) -> Machine:
    """The nodes of a target and their GPUs, from the nodes themselves: they decide the backend of every part."""

    async def ask() -> Machine:
        access = target.open_nodes(limit_s=launch.CAPABILITIES_TIMEOUT_S, home=home)
        try:
            nodes = await access.nodes()
            offers = await launch.query_capabilities(nodes, access)
        finally:
            await access.close()
        answers = [offer for offer in offers.values() if isinstance(offer, launch.Capabilities)]
        gpus = sum(max(offer.gpus, offer.devices) for offer in answers)
        known = bool(answers) and not (expects_gpus and gpus == 0)
        return Machine(on=on, gpus=gpus if known else None, nodes=len(nodes))

    return run(ask())


def plan(
    suite: Suite,
    options: Options,
    machine: Machine,
    folder: Path,
    *,
    expect: Sequence[str] = (),
    only: Sequence[str] = (),
    min_busbw: float | None = None,
) -> list[Part]:
    """The parts in their order. `options` are those of every training; `expect` and `only` are for the checks."""
    where = ["--on", machine.on] if machine.on is not None else []
    checks = ["check", "--level", str(LEVEL[suite]), *where]
    checks += [word for name in expect for word in ("--expect", name)]
    checks += [word for name in only for word in ("--only", name)]
    parts = [Part(name="check", title="Health checks", kind="check", words=[*checks, "--json"])]
    parts += _bandwidth(suite, options, machine, folder, min_busbw)
    parts += [_training(model, options, where, folder) for model in _MODELS[suite]]
    return [*parts, _isolation(machine)]


def _bandwidth(suite: Suite, options: Options, machine: Machine, folder: Path, min_busbw: float | None) -> list[Part]:
    stated = options.backend if machine.on is not None else None
    nccl = (machine.gpus != 0 or stated == "nccl") and options.backend != "gloo"
    base, ranks = _ranks(machine, options, nccl=nccl)
    base += ["--min-busbw", str(min_busbw)] if min_busbw is not None else []
    largest = {"quick": "1G", "full": "8G"}[suite] if nccl else {"quick": "1M", "full": "16M"}[suite]
    few = ["--collective", "all_reduce"] if suite == "quick" else []
    alone = f"one rank has no peer: {machine.gpus} GPU, {ranks} rank" if ranks == 1 else None

    def part(name: str, title: str, *more: str, forced: bool = False, skip: str | None = None) -> Part:
        return Part(
            name=name, title=title, kind="bandwidth", env=FORCED_NETWORK if forced else {}, skip=alone or skip,
            words=[*base, *more, "--out", str(folder / "parts" / name), "--json"],
        )  # fmt: skip

    no_nccl = None if nccl else "NCCL's transports are those of GPUs; the backend here is gloo"
    parts = [part("bandwidth", "Collectives, fastest path", *few, "--max", largest)]
    if suite == "quick":
        return parts
    small = ("--collective", "all_reduce", "--min", "1K", "--max", "8K")
    forced = ("--collective", "all_reduce", "--max", largest)
    return [
        *parts,
        part("bandwidth-network", "Collectives, forced onto the network", *forced, forced=True, skip=no_nccl),
        part("latency", "Latency of small messages", *small),
    ]


def _ranks(machine: Machine, options: Options, *, nccl: bool) -> tuple[list[str], int | None]:
    """Words for backend and ranks, and the number of ranks; None where the nodes decide."""
    stated = ["--processes", str(options.processes)] if options.processes is not None else []
    if machine.on is not None:
        return ["bandwidth", "--on", machine.on, "--backend", "nccl" if nccl else "gloo", *stated], None
    ranks = options.processes or (machine.gpus if nccl and machine.gpus is not None else 2)
    if not nccl:
        return ["bandwidth", "--backend", "gloo", "--processes", str(ranks)], ranks
    return ["bandwidth", "--backend", "nccl", *stated], ranks


def _training(model: Model, options: Options, where: Sequence[str], folder: Path) -> Part:
    batch = _BATCH[model] if options.batch_size == Options().batch_size else options.batch_size
    mine = replace(options, model=model, batch_size=batch, log_dir=str(folder / "parts" / f"train-{model}"))
    if model == "transformer":
        mine = replace(mine, data_mode="synthetic", image_size=None)
    out = str(folder / "parts" / f"train-{model}" / "results.json")
    return Part(
        name=f"train-{model}",
        title=f"Training {model}, batch {batch}",
        kind="training",
        words=["accept", *words(mine), *where, "--out", out, "--json"],
    )


def _isolation(machine: Machine) -> Part:
    skip = None if machine.on is not None else "one machine has no other node to be paired with: --on is not given"
    stated = targets.find_traits(machine.on) if machine.on is not None else None
    if machine.on is not None and (stated is None or not stated.nodes):
        skip = f"pairs of nodes are tested over SSH, in Slurm or in pods, and the target is {machine.on}"
    elif machine.nodes == 1:
        skip = "one node has no other to be paired with"
    elif machine.nodes == 2:
        skip = (
            "two nodes are one pair, with nothing to compare it with: it needs three nodes, or what a pair should "
            f"reach: trainmaster isolate --on {machine.on} --expect GB/S"
        )
    where = ["--on", machine.on] if machine.on is not None else []
    return Part(
        name="isolate", title="Which node or link is slow", kind="isolation", words=["isolate", *where, "--json"],
        skip=skip, if_slow=True,
    )  # fmt: skip
