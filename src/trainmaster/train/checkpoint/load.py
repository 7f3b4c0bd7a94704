"""Resume a run from the newest good checkpoint, on any number of ranks. Never a silent step 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
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
from trainmaster.train import agree
from trainmaster.train.checkpoint import manifest as manifests
from trainmaster.train.checkpoint.manifest import Manifest
from trainmaster.train.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint that the run now continues from."""

    state: State
    path: Path
    seconds: float


def load_newest(
    folder: Path,
    *,
    run: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rejected: Callable[[Path, str], None],
) -> Loaded | None:
    """Fill model and optimizer from the newest good checkpoint; None where there has never been one.

    Each bad one on the way down goes to `rejected`. CheckpointError where checkpoints exist and none is good, or where
    they belong to another run.
    """
    started = time.perf_counter()
    try:
        steps = agree.on_first(lambda: manifests.list_steps(folder))
    except agree.RankError as wrong:
        raise CheckpointError(
            f"{folder} cannot be read, so nobody knows whether it holds checkpoints: {wrong}"
        ) from wrong
    for step in steps:
        path = manifests.path_of(folder, step)
        try:
            manifest = _verify(path)
            _must_match(path, _as_of_today(path, manifest.run), run)
            state = schema.build(State, manifest.state)
            _fill(path, model, optimizer)
        except (agree.RankError, CheckpointException, SpecError) as wrong:
            rejected(path, agree.cause(wrong))
            continue
        return Loaded(state=state, path=path, seconds=time.perf_counter() - started)
    if steps:
        raise CheckpointError(
            f"none of the {len(steps)} checkpoints in {folder} can be trusted; restore one, or move the folder away "
            "to start at step 0"
        )
    return None


def load_weights(path: Path, *, config: ModelConfig, model: nn.Module) -> float:
    """Fill the model alone from a checkpoint of any run, for a new one to start with; returns the seconds it took.

    CheckpointError where it is not good or of another shape: who named it wants it and nothing else.
    """
    started = time.perf_counter()
    try:
        saved = schema.build(ModelConfig, _verify(path).run.get("model"))
        _must_match(path, {"model": _meaning(saved)}, {"model": _meaning(config)})
        weights = get_model_state_dict(model)
        load_shards({"model": weights}, storage_reader=FileSystemReader(path))
        set_model_state_dict(model, weights)
    except (agree.RankError, CheckpointException, SpecError) as wrong:
        raise CheckpointError(f"init_from: {path} cannot be used: {agree.cause(wrong)}") from wrong
    return time.perf_counter() - started


def _meaning(config: ModelConfig) -> Mapping[str, Any]:
    """What the weights mean something with; how they are trained and how far may change."""
    plain: Mapping[str, Any] = schema.to_plain(replace(config, balance=0.0, context_tokens=None))
    return plain


def _verify(path: Path) -> Manifest:
    """The manifest of a checkpoint whose every byte is as it says, the reading shared out over the ranks."""
    manifest = agree.on_first(lambda: manifests.read(path))
    names = sorted(manifest.files)[dist.get_rank() :: dist.get_world_size()]
    share = {name: manifest.files[name] for name in names}
    faults = [fault for fault in agree.on_all(lambda: manifests.find_fault(path, share, deep=True)) if fault]
    if faults:
        raise agree.RankError("; ".join(faults))
    return manifest


_SECTIONS = {"model": ModelConfig, "data": DataConfig}


def _as_of_today(path: Path, saved: Mapping[str, Any]) -> Mapping[str, Any]:
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


def _must_match(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """A good checkpoint of another run is no reason to go down to an older one, nor to start over."""
    different = sorted(name for name in {*saved, *wanted} if saved.get(name) != wanted.get(name))
    if different:
        changes = "; ".join(f"{name} was {saved.get(name)}, is now {wanted.get(name)}" for name in different)
        raise CheckpointError(f"{path} belongs to another run: {changes}; set it back, or choose another folder")


def _fill(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights, moments = get_state_dict(model, optimizer)
    # Read in place: each rank fetches its own parts, from however many shards they were written in.
    load_shards({"model": weights, "optimizer": moments}, storage_reader=FileSystemReader(path))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
