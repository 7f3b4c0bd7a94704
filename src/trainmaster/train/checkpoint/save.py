"""One save: every rank writes its files, rank 0 commits. It fails on all ranks or on none.

Runs beside training, in a thread of its own on every rank, with a group of its own: what these threads say to each
other never mixes with what the training threads say.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from trainmaster.core.backoff import backoff_s
from trainmaster.core.compat import UTC
from trainmaster.core.errors import CheckpointError, TrainmasterError
from trainmaster.train.checkpoint import manifest as manifests
from trainmaster.train.checkpoint.layout import INDEX
from trainmaster.train.checkpoint.lock import Fence, LockHeld, LockLost
from trainmaster.train.checkpoint.manifest import FileRecord, Manifest
from trainmaster.train.checkpoint.snapshot import Snapshot
from trainmaster.train.checkpoint.write import write
from trainmaster.train.drill.failpoints import reach
from trainmaster.train.parallel import rank_sync

T = TypeVar("T")


_OWN_PART = 10  # times the patience for other ranks: how long this rank may write before it is given up


class CannotSave(TrainmasterError):
    """The place of checkpoints cannot be written, so the run would save nothing."""


class SaveError(Exception):
    """A save that did not happen; what was saved before is as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A committed checkpoint."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often a failed save is tried again, and the pause before the first time; it doubles."""

    count: int
    pause_s: float


class Save:
    """A save under way. The thread is a daemon: a process that must end does not wait for it unless told to."""

    def __init__(self, work: Callable[[Save], None]) -> None:
        self.written = threading.Event()  # this rank's own files are done; the rest is up to the others
        self.result: Written | None = None
        self.warning: str | None = None
        self.fault: str | None = None
        self.lost: CheckpointError | None = None  # another run holds the lock: this one must end
        self.seconds = 0.0
        self.began = time.perf_counter()
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, patience_s: float | None = None) -> bool:
        """Until it has ended; given a patience, no longer than that after this rank's own part is done."""
        if patience_s is None:
            self._thread.join()
            return True
        # A peer that hangs before this rank's part is worth no more than the disk is given.
        self.written.wait(_OWN_PART * patience_s)
        self._thread.join(patience_s)
        return self.done

    def ends_within(self, seconds: float | None) -> bool:
        self._thread.join(seconds)
        return self.done

    def _run(self, work: Callable[[Save], None]) -> None:
        try:
            work(self)
        except (LockHeld, LockLost) as error:
            self.lost, self.fault = error, str(error)
        except SaveError as error:
            self.fault = str(error)
        except Exception as error:  # a peer that is gone, mostly: training will find out by itself
            self.fault = f"{type(error).__name__}: {error}"
        finally:
            self.written.set()
            self.seconds = time.perf_counter() - self.began


def save(
    folder: Path,
    snapshot: Snapshot,
    *,
    fence: Fence,
    group: dist.ProcessGroup,
    retries: Retries,
    threads: int,
    written: threading.Event,
) -> Written:
    """Write and commit, trying again after a failure; SaveError on every rank once no attempt is left."""
    return retry(
        lambda: _attempt(folder, snapshot, fence=fence, group=group, threads=threads, written=written), retries
    )


def retry(action: Callable[[], T], retries: Retries) -> T:
    """What fails on all ranks alike is tried again on all; SaveError once no attempt is left."""
    for attempt in range(retries.count + 1):
        try:
            return action()
        except rank_sync.RankError as error:
            if attempt == retries.count:
                times = f" ({attempt + 1} attempts)" if attempt else ""
                raise SaveError(f"{error}{times}") from error
            time.sleep(backoff_s(attempt + 1, first_s=retries.pause_s, jitter=False))
    raise AssertionError("unreachable")


def prune(
    folder: Path,
    *,
    keep: int,
    keep_every: int | None,
    newest: int,
    spare: Collection[int],
    known_good: set[int],
    fence: int,
    group: dist.ProcessGroup | None,
) -> str | None:
    """Delete old checkpoints, only ever after a newer one is committed; returns a fault as text."""
    try:
        rank_sync.on_first(
            lambda: manifests.prune(
                folder,
                keep=keep,
                keep_every=keep_every,
                newest=newest,
                spare=spare,
                known_good=known_good,
                fence=fence,
            ),
            group=group,
        )
    except rank_sync.RankError as error:
        return f"old checkpoints could not be deleted: {error}"
    reach("save:pruned")
    return None


def _attempt(
    folder: Path,
    snapshot: Snapshot,
    *,
    fence: Fence,
    group: dist.ProcessGroup,
    threads: int,
    written: threading.Event,
) -> Written:

    fence.check(group=group)
    draft = manifests.draft_of(folder, snapshot.state.step, fence=fence.number)

    def write_mine() -> dict[str, FileRecord]:
        records = write_files(draft, snapshot, threads=threads)
        written.set()
        return records

    try:
        rank_sync.on_first(lambda: manifests.begin(draft), group=group)
        parts = rank_sync.on_all(write_mine, group=group)
        reach("save:hashed")
        return rank_sync.on_first(
            lambda: commit(draft, describe(snapshot, parts, fence=fence.number), guard=fence.check_here), group=group
        )
    except rank_sync.RankError:
        if dist.get_rank() == 0:
            with contextlib.suppress(OSError):  # the disk may be full: give back what the failed save took
                shutil.rmtree(draft)
        raise


def write_files(folder: Path, snapshot: Snapshot, *, threads: int, over: bool = False) -> dict[str, FileRecord]:
    """This rank's files, several at once: a hash keeps one core busy, and the disk wants more than one can hash.

    `over`: files that are there may be written over.
    """
    layout = snapshot.layout
    snapshot.arrived()
    reach("save:staged")
    pieces = {shard.name: layout.pieces(shard, snapshot.tensors, snapshot.things) for shard in layout.shards}
    if dist.get_rank() == 0:
        pieces[INDEX] = [layout.index(snapshot.things)]
    with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-write") as pool:
        begun = {name: pool.submit(write, folder / name, parts, over=over) for name, parts in pieces.items()}
        records = {name: future.result() for name, future in begun.items()}
    reach("save:shards")
    return records


def describe(snapshot: Snapshot, parts: Sequence[Mapping[str, FileRecord]], *, fence: int) -> Manifest:
    """The manifest over the files that each rank wrote."""
    return Manifest(
        step=snapshot.state.step,
        state=asdict(snapshot.state),
        run=snapshot.run,
        files={name: record for part in parts for name, record in part.items()},
        ranks=len(parts),
        torch=torch.__version__,
        saved_at=datetime.now(UTC).isoformat(),
        feed=snapshot.feed,
        origin={**snapshot.origin, "files": {name: rank for rank, part in enumerate(parts) for name in part}},
        fence=fence,
    )


def commit(draft: Path, manifest: Manifest, *, guard: Callable[[], None]) -> Written:
    """On rank 0, once every rank has written."""
    # On nodes without a common file system each sees its own files alone.
    fault = manifests.find_fault(draft, manifest.files, deep=False)
    if fault is not None:
        raise FileNotFoundError(f"{fault} in {draft}; the folder must be shared by all nodes")
    path = manifests.commit(draft, manifest, guard=guard)
    reach("save:committed")
    return Written(path=path, manifest=manifest)
