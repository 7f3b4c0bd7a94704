"""Resume a run from the newest good checkpoint, on any number of ranks. Never a silent step 0."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from trainmaster.core import schema
from trainmaster.core.errors import CheckpointError, SpecError
from trainmaster.core.train_config import DataConfig, ModelConfig
from trainmaster.train.checkpoint import manifest as manifests
from trainmaster.train.checkpoint.layout import INDEX
from trainmaster.train.checkpoint.manifest import Manifest
from trainmaster.train.checkpoint.read import Reader, share_out
from trainmaster.train.drill.failpoints import reach
from trainmaster.train.parallel import rank_sync
from trainmaster.train.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint that the run now continues from."""

    state: State
    path: str  # a folder, or the URL of one
    seconds: float
    feed: Mapping[str, Any] | None = None  # of a data source that has a state of its own
    tier: str = "disk"


class Rejected(Protocol):
    """Is told of each checkpoint that could not be trusted, and of each place that could not be asked."""

    def __call__(self, path: str, why: str, tier: str = "disk") -> None: ...


class Place(Protocol):
    """Somewhere that checkpoints may be: a folder, the memory of the nodes, an object store.

    Every method is called on all ranks alike and answers all alike, or raises RankError on all.
    """

    @property
    def tier(self) -> str: ...

    def list_steps(self) -> list[int]:
        """Every step committed here, good or bad."""

    def where(self, step: int) -> str:
        """What people call it: a folder, or the URL of one."""

    def fetch(self, step: int) -> tuple[Path, Manifest]:
        """A folder that every rank can read from what it needs of it, and its manifest."""

    @property
    def verifies(self) -> bool:
        """Whether `fetch` has compared every byte with the manifest; if not, who loads does."""


class Folder:
    """A folder that all nodes share."""

    tier = "disk"
    verifies = False  # done while loading, so that the disk is read once

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def list_steps(self) -> list[int]:
        return rank_sync.on_first(lambda: manifests.list_steps(self._folder))

    def where(self, step: int) -> str:
        return str(manifests.path_of(self._folder, step))

    def fetch(self, step: int) -> tuple[Path, Manifest]:
        path = manifests.path_of(self._folder, step)
        return path, rank_sync.on_first(lambda: _read_manifest(path))

    def __str__(self) -> str:
        return str(self._folder)


def load_newest(
    places: Sequence[Place],
    *,
    run: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rejected: Rejected,
    threads: int = 1,
) -> Loaded | None:
    """Fill model and optimizer from the newest good checkpoint; None where there has never been one.

    `places` are nearest first, and of one step in several of them the nearest is taken. Each bad one on the way down
    goes to `rejected`, and a place that cannot be asked too. CheckpointError where checkpoints exist and none is good,
    where they belong to another run, or where a place that cannot be asked may hold a newer one: no step is in a place
    that was not in the nearer ones first, so that is so unless the newest of a nearer one is good.
    """
    started = time.perf_counter()
    found: list[tuple[int, int]] = []
    unread: dict[int, str] = {}
    for number, place in enumerate(places):
        try:
            found += [(-step, number) for step in place.list_steps()]
        except rank_sync.RankError as wrong:
            unread[number] = f"{place} cannot be read, so nobody knows whether it holds checkpoints: {wrong}"
            if len(places) > 1:
                rejected(str(place), f"cannot be read: {wrong}", place.tier)
    reach("load:listed")
    newest_bad = -1
    for backwards, number in sorted(found):
        step, place = -backwards, places[number]
        if any(other < number or newest_bad > step for other in unread):
            raise CheckpointError(
                f"{'; '.join(unread.values())}; step {step} in {place} may not be the newest: make that place "
                "readable, or take it out of the config to go on without it"
            )
        try:
            path, manifest = place.fetch(step)
            must_match(path, as_of_today(path, manifest.run), run)
            state = schema.build(State, manifest.state)
            reach("load:verified")
            _fill(path, manifest, model, optimizer, verify=not place.verifies, threads=threads)
            reach("load:filled")
        except (rank_sync.RankError, CheckpointException, SpecError) as wrong:
            rejected(place.where(step), rank_sync.cause(wrong), place.tier)
            newest_bad = max(newest_bad, step)
            continue
        return Loaded(
            state=state,
            path=place.where(step),
            seconds=time.perf_counter() - started,
            feed=manifest.feed,
            tier=place.tier,
        )
    if found:
        where = " and ".join(str(place) for place in places)
        away = "the folder" if len(places) == 1 else "all of them"
        raise CheckpointError(
            f"none of the {len(found)} checkpoints in {where} can be trusted; restore one, or move {away} away "
            "to start at step 0"
        )
    if unread:
        raise CheckpointError("; ".join(unread.values()))
    return None


def load_weights(path: Path, *, config: ModelConfig, model: nn.Module, threads: int = 1) -> float:
    """Fill the model alone from a checkpoint of any run, for a new one to start with; returns the seconds it took.

    CheckpointError where it is not good or of another shape: who named it wants it and nothing else.
    """
    started = time.perf_counter()
    try:
        manifest = rank_sync.on_first(lambda: _read_manifest(path))
        saved = schema.build(ModelConfig, manifest.run.get("model"))
        must_match(path, {"model": _meaning(saved)}, {"model": _meaning(config)})
        weights = get_model_state_dict(model)
        load_shards({"model": weights}, storage_reader=_reader(path, manifest, verify=True, threads=threads))
        set_model_state_dict(model, weights)
    except (rank_sync.RankError, CheckpointException, SpecError) as wrong:
        raise CheckpointError(f"init_from: {path} cannot be used: {rank_sync.cause(wrong)}") from wrong
    return time.perf_counter() - started


def _meaning(config: ModelConfig) -> Mapping[str, Any]:
    """What the weights mean something with; how they are trained and how far may change."""
    plain: Mapping[str, Any] = schema.to_plain(replace(config, balance=0.0, context_tokens=None))
    return plain


def _read_manifest(path: Path) -> Manifest:
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
    """What a checkpoint says of its run, in the words of this version: a field it did not know has its default.

    Without this every new field of a config would make strangers of all checkpoints there are.
    """
    try:
        known = {name: schema.to_plain(schema.build(kind, saved[name])) for name, kind in _SECTIONS.items()}
    except (SpecError, KeyError) as wrong:
        raise CheckpointError(
            f"{path} was written by another version of Trainmaster, and is its to read: {wrong}"
        ) from wrong
    return {**saved, **known}


def must_match(path: Path | str, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """A good checkpoint of another run is no reason to go down to an older one, nor to start over."""
    different = sorted(name for name in {*saved, *wanted} if saved.get(name) != wanted.get(name))
    if different:
        changes = "; ".join(f"{name} was {saved.get(name)}, is now {wanted.get(name)}" for name in different)
        raise CheckpointError(f"{path} belongs to another run: {changes}; set it back, or choose another folder")


def _fill(
    path: Path, manifest: Manifest, model: nn.Module, optimizer: torch.optim.Optimizer, *, verify: bool, threads: int
) -> None:
    weights, moments = get_state_dict(model, optimizer)
    # Read in place: each rank fetches its own parts, from however many shards they were written in.
    load_shards(
        {"model": weights, "optimizer": moments},
        storage_reader=_reader(path, manifest, verify=verify, threads=threads),
    )
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
