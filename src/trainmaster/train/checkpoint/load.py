"""Resume a run from the newest good checkpoint, on any number of ranks. Never a silent step 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from trainmaster.core import schema
from trainmaster.core.config.train import DataConfig, ModelConfig
from trainmaster.core.errors import CheckpointError, Fault, LaterVersion, SpecError
from trainmaster.train.checkpoint import manifest as manifests
from trainmaster.train.checkpoint.layout import INDEX
from trainmaster.train.checkpoint.manifest import Manifest
from trainmaster.train.checkpoint.protocol import Loaded, Rejected
from trainmaster.train.checkpoint.read import Reader, fill, share_out
from trainmaster.train.drill.failpoints import reach
from trainmaster.train.experiment import differences
from trainmaster.train.parallel import rank_sync
from trainmaster.train.parallel.groups import open_group
from trainmaster.train.state import State

Beside = Callable[["Future[None]"], None]  # what is done while a load is under way


class ReadableTier(Protocol):
    """A tier to load from: the memory of the nodes, a shared folder, an object store.

    Every method is called on all ranks alike and returns the same on all, or raises RankError on all.
    """

    @property
    def name(self) -> str:
        """memory, disk or remote."""

    def list_steps(self) -> list[int]:
        """Every step committed here, good or bad."""

    def where(self, step: int) -> str:
        """Its name for log lines and events: a folder, or the URL of one."""

    def fetch(self, step: int) -> tuple[Path, Manifest]:
        """A folder from which this rank can read all that it needs of the step, and the manifest."""

    @property
    def verifies(self) -> bool:
        """Whether `fetch` compares every byte with the manifest; if not, the reader does."""


def load_newest(
    tiers: Sequence[ReadableTier],
    *,
    run: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rejected: Rejected,
    group: dist.ProcessGroup | None,
    threads: int = 1,
    beside: Beside | None = None,
) -> Loaded | None:
    """Fill model and optimizer from the newest good checkpoint; None where there has never been one.

    `tiers` are nearest first, and of one step in several of them the nearest is taken. Each bad one on the way down
    goes to `rejected`, and a tier that cannot be read too. CheckpointError where checkpoints exist and none is good,
    where they belong to another run or a later version, or where a tier that cannot be read may hold a newer one: no
    step is in a tier that was not in the nearer ones first, so that is so unless the newest of a nearer one is good.
    `beside` is called on every rank while the first candidate is read.
    """
    started = time.perf_counter()
    candidates: list[tuple[int, int]] = []
    unread: dict[int, str] = {}
    for number, tier in enumerate(tiers):
        try:
            candidates += [(-step, number) for step in tier.list_steps()]
        except rank_sync.RankError as error:
            unread[number] = f"{tier} cannot be read, so it is not known whether it holds checkpoints: {error}"
            if len(tiers) > 1:
                rejected(str(tier), f"cannot be read: {error}", tier.name)
    reach("load:listed")
    newest_bad = -1
    for backwards, number in sorted(candidates):
        step, tier = -backwards, tiers[number]
        if any(other < number or newest_bad > step for other in unread):
            raise CheckpointError(
                f"{'; '.join(unread.values())}; step {step} in {tier} may not be the newest: make that tier "
                "readable, or take it out of the config to go on without it"
            )
        try:
            path, manifest = tier.fetch(step)
            must_match(path, as_of_today(path, manifest.run), run)
            state = schema.build(State, manifest.state, path="state")
            if {manifest.step, state.step} != {step}:
                raise SpecError([Fault(path="step", message=f"it is of step {state.step}, its name of {step}")])
            reach("load:verified")
            beside_it, beside = beside, None
            verify = not tier.verifies
            _fill(path, manifest, model, optimizer, verify=verify, threads=threads, group=group, beside=beside_it)
            reach("load:filled")
        except (rank_sync.RankError, CheckpointException, SpecError) as error:
            if LaterVersion.__name__ in getattr(error, "kinds", ()):  # whole, and newer: its name must not be reused
                why = f"{tier.where(step)}: {rank_sync.cause(error)}"
                raise CheckpointError(f"{why}, or move it away to go on from an older one") from None
            rejected(tier.where(step), rank_sync.cause(error), tier.name)
            newest_bad = max(newest_bad, step)
            continue
        return Loaded(
            state=state,
            path=tier.where(step),
            seconds=time.perf_counter() - started,
            feed=manifest.feed,
            tier=tier.name,
        )
    if candidates:
        where = " and ".join(str(tier) for tier in tiers)
        away = "the folder" if len(tiers) == 1 else "all of them"
        raise CheckpointError(
            f"none of the {len(candidates)} checkpoints in {where} can be trusted; restore one, or move {away} away "
            "to start at step 0"
        )
    if unread:
        raise CheckpointError("; ".join(unread.values()))
    return None


def load_weights(path: Path, *, config: ModelConfig, model: nn.Module, timeout_s: float, threads: int = 1) -> float:
    """Fill the model alone from a checkpoint of any run, for a new one to start with; returns the seconds it took.

    CheckpointError where it is damaged or of another shape: no other checkpoint is tried in its place.
    """
    started = time.perf_counter()
    group = open_group(timeout_s, "checkpoint_init")
    try:
        manifest = rank_sync.on_first(lambda: read_manifest(path), group=group)
        saved = schema.build(ModelConfig, manifest.run.get("model"))
        must_match(path, {"model": _meaning(saved)}, {"model": _meaning(config)})
        weights = get_model_state_dict(model)
        fill({"model": weights}, _reader(path, manifest, verify=True, threads=threads), group=group)
        set_model_state_dict(model, weights)
    except (rank_sync.RankError, CheckpointException, SpecError) as error:
        raise CheckpointError(f"init_from: {path} cannot be used: {rank_sync.cause(error)}") from error
    return time.perf_counter() - started


def _meaning(config: ModelConfig) -> Mapping[str, Any]:
    """What the weights mean something with; how they are trained and how far may change."""
    plain: Mapping[str, Any] = schema.to_plain(replace(config, balance=0.0, context_tokens=None))
    return plain


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there, and whose index may be read: it is a pickle."""
    manifest = manifests.read(path)
    fault = manifests.find_fault(path, manifest.files, deep=False)
    if fault is None and INDEX in manifest.files:
        fault = manifests.find_fault(path, {INDEX: manifest.files[INDEX]}, deep=True)
    if fault is not None or INDEX not in manifest.files:
        raise CheckpointError(fault or f"it has no {INDEX}")
    return manifest


def _reader(path: Path, manifest: Manifest, *, verify: bool, threads: int) -> Reader:
    share = share_out(manifest, rank=dist.get_rank(), ranks=dist.get_world_size()) if verify else {}
    return Reader(path, verify=share, threads=threads)


_SECTIONS = {"model": ModelConfig, "data": DataConfig}


def as_of_today(path: Path | str, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """The identity in a checkpoint, in the fields of this version: a field that it did not have gets its default.

    Without this every new field of a config would make strangers of all checkpoints there are.
    """
    try:
        known = {name: schema.to_plain(schema.build(kind, saved[name])) for name, kind in _SECTIONS.items()}
    except (SpecError, KeyError) as error:
        raise CheckpointError(
            f"{path} was written by another version of Trainmaster, and is its to read: {error}"
        ) from error
    return {**saved, **known}


def must_match(path: Path | str, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """A good checkpoint of another run is no reason to go down to an older one, nor to start over."""
    different = sorted(name for name in {*saved, *wanted} if saved.get(name) != wanted.get(name))
    if different:
        named = {name: saved.get(name) for name in different}, {name: wanted.get(name) for name in different}
        changes = "; ".join(f"{name} was {before}, is now {after}" for name, before, after in differences(*named))
        raise CheckpointError(f"{path} belongs to another run: {changes}; set it back, or choose another folder")


def _fill(
    path: Path,
    manifest: Manifest,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    verify: bool,
    threads: int,
    group: dist.ProcessGroup | None,
    beside: Beside | None,
) -> None:
    weights, moments = get_state_dict(model, optimizer)
    reader = _reader(path, manifest, verify=verify, threads=threads)
    state = {"model": weights, "optimizer": moments}
    if beside is None:
        fill(state, reader, group=group)
    else:
        with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-load") as pool:
            filling = pool.submit(fill, state, reader, group=group)
            beside(filling)
        filling.result()
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
