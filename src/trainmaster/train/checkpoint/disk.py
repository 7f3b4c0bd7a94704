"""The disk tier: checkpoints in a folder that all nodes share."""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path

import torch.distributed as dist

from trainmaster.core.config.checkpoint import CheckpointConfig
from trainmaster.train.checkpoint import manifest as manifests
from trainmaster.train.checkpoint.load import read_manifest
from trainmaster.train.checkpoint.lock import Fence
from trainmaster.train.checkpoint.manifest import Manifest
from trainmaster.train.checkpoint.save import Retries, Written, prune, save
from trainmaster.train.checkpoint.snapshot import Snapshot
from trainmaster.train.checkpoint.tiers.loss_bound import DISK
from trainmaster.train.parallel import rank_sync


class DiskTier:
    """One folder. Every method is called on all ranks alike, and fails on all alike (RankError)."""

    name = DISK
    verifies = False  # done while loading, so that the disk is read once

    def __init__(
        self, folder: Path, config: CheckpointConfig, *, fence: Fence, loads: dist.ProcessGroup | None, threads: int
    ) -> None:
        self.folder, self.fence, self._loads = folder, fence, loads
        self.retries = Retries(count=config.retries, pause_s=config.retry_s)
        self._keep, self._keep_every = config.keep, config.keep_every_steps
        self._threads = threads
        self._good: set[int] = set()  # steps that need not be looked at again before older ones are deleted

    def list_steps(self) -> list[int]:
        return rank_sync.on_first(lambda: manifests.list_steps(self.folder), group=self._loads)

    def where(self, step: int) -> str:
        return str(manifests.path_of(self.folder, step))

    def fetch(self, step: int) -> tuple[Path, Manifest]:
        path = manifests.path_of(self.folder, step)
        return path, rank_sync.on_first(lambda: read_manifest(path), group=self._loads)

    def __str__(self) -> str:
        return str(self.folder)

    def write(self, snapshot: Snapshot, *, group: dist.ProcessGroup, written: threading.Event) -> Written:
        """Write and commit a snapshot, with retries; `written` is set when this rank's own files are done."""
        return save(
            self.folder,
            snapshot,
            fence=self.fence,
            group=group,
            retries=self.retries,
            threads=self._threads,
            written=written,
        )

    def prune(self, newest: int, *, spare: Collection[int], group: dist.ProcessGroup | None) -> str | None:
        """Delete old checkpoints except the steps in `spare`; returns a fault as text."""
        self.fence.check(group=group)
        keep, keep_every = self._keep, self._keep_every
        self._good.add(newest)  # committed or loaded a moment ago
        return prune(
            self.folder,
            keep=keep,
            keep_every=keep_every,
            newest=newest,
            spare=spare,
            known_good=self._good,
            fence=self.fence.number,
            group=group,
        )
