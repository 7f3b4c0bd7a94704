"""Save a run: every rank writes its shards, rank 0 commits. It fails on all ranks or on none."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from trainmaster.train import agree
from trainmaster.train.checkpoint import manifest as manifests
from trainmaster.train.checkpoint.manifest import FileRecord, Manifest
from trainmaster.train.state import State

_NO_ROOM_BYTES = 1 << 20  # file systems keep a few blocks they do not hand out


class SaveError(Exception):
    """A save that did not happen; what was saved before is as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A committed checkpoint."""

    step: int
    path: Path
    size_bytes: int
    seconds: float


def save(
    folder: Path, *, state: State, run: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> Saved:
    """Write and commit a checkpoint of this step; SaveError on every rank if any rank could not do its part."""
    started = time.perf_counter()
    draft = folder / f"{manifests.path_of(folder, state.step).name}.tmp"
    try:
        agree.on_first(lambda: manifests.begin(draft))
        weights, moments = get_state_dict(model, optimizer)
        save_shards(
            {"model": weights, "optimizer": moments},
            storage_writer=FileSystemWriter(draft, sync_files=True, overwrite=False),
        )
        files = _measure(draft)
        manifest = Manifest(
            step=state.step,
            state=asdict(state),
            run=run,
            files=files,
            ranks=dist.get_world_size(),
            torch=torch.__version__,
            saved_at=datetime.now(UTC).isoformat(),
        )
        path = agree.on_first(lambda: manifests.commit(draft, manifest))
    except (agree.RankError, CheckpointException) as wrong:
        why = agree.cause(wrong) + _room(folder)
        if dist.get_rank() == 0:
            with contextlib.suppress(OSError):  # the disk may be full: give back what the failed save took
                shutil.rmtree(draft)
        raise SaveError(why) from wrong
    return Saved(step=state.step, path=path, size_bytes=manifest.size_bytes, seconds=time.perf_counter() - started)


def prune(folder: Path, *, keep: int, newest: int) -> None:
    """Delete old checkpoints; only ever called after a newer one is committed."""
    try:
        agree.on_first(lambda: manifests.prune(folder, keep=keep, newest=newest))
    except agree.RankError as wrong:
        raise SaveError(f"old checkpoints could not be deleted: {wrong}") from wrong


def _measure(draft: Path) -> dict[str, FileRecord]:
    """Every file of the draft with its hash, the reading shared out over the ranks."""
    names = agree.on_first(lambda: _listed(draft))
    mine = names[dist.get_rank() :: dist.get_world_size()]
    parts = agree.on_all(lambda: {name: manifests.measure(draft / name) for name in mine})
    return {name: record for part in parts for name, record in part.items()}


def _listed(draft: Path) -> list[str]:
    names = sorted(entry.name for entry in draft.iterdir())
    # What the shards' own index names must be there: on nodes without a common file system each sees only its own.
    index = FileSystemReader(draft).read_metadata().storage_data
    missing = sorted({item.relative_path for item in index.values()} - set(names))
    if missing:
        raise FileNotFoundError(f"{', '.join(missing)} not in {draft}; the folder must be shared by all nodes")
    return names


def _room(folder: Path) -> str:
    """torch reports a full disk as "unexpected pos"; say it in the words people and log rules look for."""
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(folder).free
        if free < _NO_ROOM_BYTES:
            return f"; {os.strerror(errno.ENOSPC)}: {free:,} bytes free in {folder}"
    return ""
