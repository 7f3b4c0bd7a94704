"""The first save of a snapshot: into the memory of the nodes, or onto the disk where memory is absent or full."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch.distributed as dist

from trainmaster.train.checkpoint.disk import DiskTier
from trainmaster.train.checkpoint.layout import INDEX
from trainmaster.train.checkpoint.manifest import FileRecord
from trainmaster.train.checkpoint.save import Save, SaveError, Written, describe, write_files
from trainmaster.train.checkpoint.snapshot import Snapshot
from trainmaster.train.checkpoint.tiers.loss_bound import DISK
from trainmaster.train.checkpoint.tiers.replicas import Replicas
from trainmaster.train.parallel import rank_sync

_FRAMES_BYTES = 1 << 20  # upper limit of the bytes around the tensors in the files of one rank


class FirstTier:
    """Writes snapshots in the background, on every rank alike."""

    def __init__(self, disk: DiskTier, memory: Replicas | None, *, group: dist.ProcessGroup, threads: int) -> None:
        self._disk, self._group, self._threads = disk, group, threads
        self.memory = memory
        self.mine: Mapping[str, FileRecord] = {}  # files that this rank wrote in the last save to memory

    def write(
        self, save: Save, snapshot: Snapshot, *, meant: set[str], copying: Collection[int], uploading: Collection[int]
    ) -> None:
        """Commit the snapshot; steps in `copying` stay in memory, those in `uploading` on the disk."""
        if self.memory is None:
            self._to_disk(save, snapshot, uploading)
            return
        self._disk.fence.check(group=self._group)
        try:
            save.result = self._to_memory(self.memory, save, snapshot, copying)
        except rank_sync.RankError as error:
            step = snapshot.state.step
            if DISK not in meant:
                raise SaveError(f"{error}; the next save to disk is not affected") from error
            self._to_disk(save, snapshot, uploading)
            self.memory.forget(before=step)  # it would pass for the newest where the disk cannot be read
            save.warning = f"step {step} went to the disk alone, memory could not take it: {error}"

    def _to_memory(self, memory: Replicas, save: Save, snapshot: Snapshot, copying: Collection[int]) -> Written:
        def write(path: Path) -> Mapping[str, FileRecord]:
            self.mine = write_files(path, snapshot, threads=self._threads, over=True)
            save.written.set()
            return self.mine

        manifest = memory.save(
            snapshot.state.step,
            size_bytes=sum(tensor.nbytes for tensor in snapshot.tensors) + _FRAMES_BYTES,
            files=[shard.name for shard in snapshot.layout.shards] + ([INDEX] if dist.get_rank() == 0 else []),
            write=write,
            describe=lambda parts: describe(snapshot, parts, fence=self._disk.fence.number),
            spare=copying,
        )
        return Written(path=Path(memory.where(snapshot.state.step)), manifest=manifest)

    def _to_disk(self, save: Save, snapshot: Snapshot, uploading: Collection[int]) -> None:
        save.result = self._disk.write(snapshot, group=self._group, written=save.written)
        save.warning = self._disk.prune(snapshot.state.step, spare=uploading, group=self._group)
