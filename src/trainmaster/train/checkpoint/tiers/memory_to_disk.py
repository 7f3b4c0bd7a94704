"""From the memory of the nodes to the disk that they share: the same files under the same manifest."""

from __future__ import annotations

import contextlib
import mmap
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from trainmaster.core.errors import CheckpointError
from trainmaster.train.checkpoint import manifest as manifests
from trainmaster.train.checkpoint.lock import Fence
from trainmaster.train.checkpoint.manifest import FileRecord, Manifest
from trainmaster.train.checkpoint.save import Written, commit
from trainmaster.train.checkpoint.write import write
from trainmaster.train.drill.failpoints import reach
from trainmaster.train.parallel import rank_sync

_PIECE_BYTES = 8 << 20


def copy_to_disk(
    source: Path,
    folder: Path,
    manifest: Manifest,
    mine: Mapping[str, FileRecord],
    *,
    fence: Fence,
    group: dist.ProcessGroup | None,
    threads: int,
) -> Written:
    """Every rank copies the files that it wrote, from its own node; rank 0 commits. RankError on all ranks alike."""
    fence.check(group=group)
    draft = manifests.draft_of(folder, manifest.step, fence=fence.number)
    try:
        rank_sync.on_first(lambda: manifests.begin(draft), group=group)
        rank_sync.on_all(lambda: copy_files(source, draft, mine, threads=threads), group=group)
        return rank_sync.on_first(lambda: commit(draft, manifest, guard=fence.check_here), group=group)
    except rank_sync.RankError:
        if dist.get_rank() == 0:
            with contextlib.suppress(OSError):  # the disk may be full: give back what the failed copy took
                shutil.rmtree(draft)
        raise


def copy_files(source: Path, draft: Path, mine: Mapping[str, FileRecord], *, threads: int) -> None:
    """Several at once, as a save does: one core's SHA-256 is slower than most disks."""

    def copy(name: str) -> None:
        if write(draft / name, _pieces(source / name), paged=True) != mine[name]:
            raise CheckpointError(f"{source / name} does not match its SHA-256 any more")

    with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-copy") as pool:
        for copied in [pool.submit(copy, name) for name in mine]:
            copied.result()
    reach("save:shards")


def _pieces(path: Path) -> Iterator[memoryview]:
    """The bytes of a file; each piece begins at a page, and is there until the next one is asked for.

    Read and not mapped: a mapped file that is cut kills the process (SIGBUS), and what was hashed is what is written.
    """
    room = memoryview(mmap.mmap(-1, _PIECE_BYTES))  # used again and not taken anew for each piece
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(room):
            yield room[:count]
