"""Checkpoints in several tiers: the memory of the nodes, the disk that they share, an object store.

    training ─copy─▶ memory of this node ─▶ memory of the next node ─▶ disk ─▶ object store
                     └─ committed when every file is on two nodes       └─ each a copy of the same files, manifest last

Each tier is fed by the one before it and never holds a step that the nearer one did not hold first. A resume relies on
that when a tier cannot be read: the newest good step of a nearer tier is not older than any step farther away. (Placing
older files into a folder by hand breaks the rule.)

Each tier works in its own thread with its own process group. A committed step passes to the next tier at the next step
boundary; a tier that is still busy then takes the newest step that waits.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from trainmaster.core.backoff import backoff_s
from trainmaster.storage import open_store
from trainmaster.train.checkpoint import manifest as manifests
from trainmaster.train.checkpoint.disk import DiskTier
from trainmaster.train.checkpoint.load import ReadableTier, load_newest
from trainmaster.train.checkpoint.lock import Fence
from trainmaster.train.checkpoint.protocol import Ended, Failed, Loaded, Run, Saved
from trainmaster.train.checkpoint.save import CannotSave, Save, SaveError, Written, retry
from trainmaster.train.checkpoint.snapshot import Snapshots, restore_feed
from trainmaster.train.checkpoint.tiers.background_copy import Follower, Job
from trainmaster.train.checkpoint.tiers.cadence import Cadence
from trainmaster.train.checkpoint.tiers.first_save import FirstTier
from trainmaster.train.checkpoint.tiers.loss_bound import DISK, MEMORY, REMOTE, Bound
from trainmaster.train.checkpoint.tiers.memory_to_disk import copy_to_disk
from trainmaster.train.checkpoint.tiers.remote import Remote
from trainmaster.train.checkpoint.tiers.replicas import Replicas, open_memory
from trainmaster.train.parallel import rank_sync
from trainmaster.train.parallel.groups import open_group
from trainmaster.train.state import State

_THREADS = 16  # at 0.5 to 2 GB/s of SHA-256 each, more than most disks take
_REFUSALS = 3  # in a row, then memory is left: a bound that counts on it would not hold
_STOP_S = 20.0  # Kubernetes gives 30 s from SIGTERM to SIGKILL, and disk and memory come first
_UPLOADS, _UPLOAD_PAUSE_S = 4, 5.0  # attempts for one step, and the pause before the second; it doubles


@dataclass(slots=True, kw_only=True)
class _Current:
    """The save under way into the first tier."""

    meant: set[str]  # tiers that it goes to
    state: State
    save: Save
    held_s: float = 0.0  # time that training waited for it

    @property
    def step(self) -> int:
        return self.state.step


class Tiered:
    """The memory, disk and remote tiers of one run, as far as its config has them."""

    def __init__(self, run: Run, folder: Path) -> None:
        config = run.config.checkpoint
        self._run, self._config = run, config
        limits = run.config.timeouts
        self._group = group = open_group(limits.save_s, "checkpoint_save")
        self._loads = open_group(limits.load_s, "checkpoint_load")
        self._threads = max(1, min(_THREADS, len(os.sched_getaffinity(0)) // run.world.rank_info.local_world_size))
        self._snapshots = Snapshots(run, group=group, threads=self._threads)
        fence = Fence(lambda: open_store(folder), lease_s=config.lease_s)
        self._disk = DiskTier(folder, config, fence=fence, loads=self._loads, threads=self._threads)
        self._memory = open_memory(run, folder, group=group, loads=self._loads, threads=self._threads)
        self._remote: Remote | None = None
        if config.remote is not None:
            uploads = open_group(limits.upload_s, "checkpoint_upload")
            self._remote = Remote(
                config.remote.url,
                disk=folder,
                lease_s=config.lease_s,
                uploads=uploads,
                asks=self._loads,
                guard=fence.check_here,
            )
        self._first = FirstTier(self._disk, self._memory, group=group, threads=self._threads)
        self._copies = open_group(limits.upload_s, "checkpoint_copy") if self._memory is not None else None
        self._to_disk = Follower(DISK, self._copy_to_disk)
        self._to_remote = Follower(REMOTE, self._upload)
        self._cadence = self._new_cadence()
        self._current: _Current | None = None
        self._in_memory: tuple[State, Job] | None = None  # the newest save that memory alone has
        self._step = 0  # of the newest save begun
        self._committed = 0  # newest step that survives the death of a process
        self._kept_step = 0  # newest step on the disk
        self._refused = 0  # saves in a row that memory could not take
        self._stale: Replicas | None = None  # memory that is no longer saved to
        self._ending = threading.Event()
        self._is_last = False  # the save under way began after the end had come
        self._ended: list[Ended] = []

    # The interface of the loop

    @property
    def bound(self) -> Bound | None:
        return self._cadence.bound

    @property
    def every_steps(self) -> int:
        return self._cadence.every_steps

    @property
    def busy(self) -> bool:
        return self._current is not None and self._config.mode == "async"

    def due(self, step: int) -> bool:
        return self._cadence.due(step)

    def resume(self) -> Loaded | None:
        self._drain()  # after a rollback a save may still be under way, and be the newest
        self._ending.clear()
        self._is_last = False
        self._snapshots.forget()
        self._in_memory = None
        run = self._run
        unlocked = self._lock_disk()
        loaded = load_newest(
            self._readable(),
            run=run.identity,
            model=run.model,
            optimizer=run.optimizer,
            rejected=run.rejected,
            threads=self._threads,
            group=self._loads,
            beside=run.beside_load,
        )
        self._snapshots.reserve()  # while the model is compiled
        # Training first and failing at the last step would lose the whole run. Memory may be saved to meanwhile.
        if unlocked is not None and self._memory is None:
            raise CannotSave(f"no checkpoint can be saved in {self._disk}: {unlocked}")
        if unlocked is not None:
            run.say(f"{self._disk} cannot be locked, so nothing is saved there until it can: {unlocked}")
        if loaded is not None and loaded.feed is not None:
            restore_feed(run.feed, loaded.feed)
        self._committed = loaded.state.step if loaded is not None else 0
        self._cadence.start(self._committed)
        if loaded is not None and loaded.tier == DISK:
            if self._disk.fence.number:
                # Before the first save: a disk that is full of what may go would never take it.
                warning = self._disk.prune(loaded.state.step, spare=(), group=self._group)
                if warning is not None:
                    run.say(warning)
            self._catch_up(loaded.state.step)
        return loaded

    def save(self, state: State) -> None:
        self._wait()
        # The last save, and that of a run which is stopped, goes to every tier.
        self._is_last = self._ending.is_set() or state.step == self._run.config.steps
        meant = self._cadence.begin(state.step, all_tiers=self._is_last)
        started = time.perf_counter()
        self._step = state.step
        if self._in_memory is not None and self._in_memory[0] == state and DISK in meant:
            self._to_disk.offer(replace(self._in_memory[1], meant=meant, began=started))
            return
        snapshot = self._snapshots.take(state)

        def write(save: Save) -> None:
            self._first.write(save, snapshot, meant=meant, copying=self._to_disk.steps, uploading=self._to_remote.steps)

        self._current = _Current(state=state, meant=meant, save=Save(write))
        if self._config.mode == "sync":
            self._current.save.wait()
        self._current.held_s = time.perf_counter() - started

    def before_update(self) -> None:
        self._snapshots.fence()

    def collect_finished(self) -> list[Ended]:
        self._cadence.tick()
        current = self._current.save if self._current is not None else None
        saves = [current, self._to_disk.save, self._to_remote.save]
        if any(save is not None for save in saves):
            running = rank_sync.any_of([save is not None and not save.done for save in saves])
            ended = [save is not None and not on for save, on in zip(saves, running, strict=True)]
            if ended[0]:
                self._collect()
            for follower, is_over in zip((self._to_disk, self._to_remote), ended[1:], strict=True):
                if is_over:
                    self._take(follower)
            if any(ended):
                self._plan_cadence()
        return self._drain_ended()

    def hold(self, least: int) -> list[Ended]:
        if self._current is None or self._committed >= least:
            return []
        started = time.perf_counter()
        self._current.save.wait()
        self._current.held_s += time.perf_counter() - started  # before it is collected: reported with the save
        self._wait()
        return self._drain_ended()

    def finish(self, patience_s: float | None = None) -> list[Ended]:
        # In the second call the step saved last is the run's last, though its save began as any other.
        self._is_last |= self._ending.is_set()
        self._ending.set()
        self._drain(patience_s)
        is_over = self._step == self._kept_step == self._run.config.steps
        # A distant store is not waited for after a failure, nor while the last step is still to be saved.
        while self._is_last and patience_s is None and self._to_remote.save is not None:
            if not self._to_remote.save.ends_within(None if is_over else _STOP_S):
                why = "stopped before its upload was complete; it is on the disk, and the next run uploads it"
                self._ended.append(Failed(step=self._step, why=why, tier=REMOTE))
                break
            self._take(self._to_remote)
        if is_over and self._memory is not None:
            self._memory.drop()
        return self._drain_ended()

    def close(self) -> None:
        if self._memory is not None:
            self._memory.give_back_room()
        self._disk.fence.release()
        if self._remote is not None:
            self._remote.fence.release()

    # Work in the background, on every rank

    def _copy_to_disk(self, job: Job, save: Save) -> None:
        disk, group, threads = self._disk, self._copies, self._threads
        save.result = retry(
            lambda: copy_to_disk(
                job.source, disk.folder, job.manifest, job.mine, fence=disk.fence, group=group, threads=threads
            ),
            disk.retries,
        )
        save.written.set()
        save.warning = self._disk.prune(job.step, spare=self._to_remote.steps, group=group)

    def _upload(self, job: Job, save: Save) -> None:
        """Upload one step. A store that is down is tried again, and later with a newer step."""
        remote, config = self._remote, self._config.remote
        assert remote is not None and config is not None
        for attempt in range(_UPLOADS):
            try:
                save.warning = remote.upload(job.step, keep=config.keep)
                save.result = Written(path=Path(), manifest=job.manifest)
                return
            except rank_sync.RankError as error:
                if attempt + 1 == _UPLOADS or remote.agreed(self._ending.is_set):
                    raise SaveError(f"{error} ({attempt + 1} attempts)") from error
                self._ending.wait(backoff_s(attempt + 1, first_s=_UPLOAD_PAUSE_S, jitter=False))

    # Collecting finished saves, on the thread that trains

    def _wait(self, patience_s: float | None = None) -> None:
        """Wait for the save under way. No collective: every rank's thread ends with the same result."""
        if self._current is not None and self._current.save.wait(patience_s):
            self._collect()

    def _drain(self, patience_s: float | None = None) -> None:
        """Wait until every save that began is on the disk."""
        self._wait(patience_s)
        while self._to_disk.save is not None and self._to_disk.save.wait(patience_s):
            self._take(self._to_disk)

    def _collect(self) -> None:
        """Report the save that ended, and pass its step to the next tier if it was meant for it."""
        assert self._current is not None
        current, self._current = self._current, None
        save, result = current.save, current.save.result
        if save.lost is not None:
            raise save.lost
        in_memory = self._memory is not None and DISK not in current.meant
        if result is not None:
            in_memory = result.path.parent != self._disk.folder
        tier = MEMORY if in_memory else DISK
        self._refused = 0 if in_memory and result is not None else self._refused + 1
        if result is None:
            self._ended.append(Failed(step=current.step, why=save.fault or "unknown", tier=tier))
        else:
            self._committed = current.step
            self._ended.append(
                Saved(
                    step=current.step,
                    path=str(result.path),
                    size_bytes=result.manifest.size_bytes,
                    seconds=save.seconds,
                    tier=tier,
                    stall_s=current.held_s + self._snapshots.held_s(),
                    kept=not in_memory,
                    warning=save.warning,
                )
            )
            self._pass_on(current, result, tier)
        if self._memory is not None and self._refused == _REFUSALS:
            self._leave_memory()

    def _pass_on(self, current: _Current, result: Written, tier: str) -> None:
        self._cadence.took(tier, current.save.seconds)
        job = Job(
            step=current.step,
            source=result.path,
            meant=current.meant,
            manifest=result.manifest,
            mine=self._first.mine,
            began=current.save.began,
        )
        self._in_memory = (current.state, job) if tier == MEMORY and DISK not in current.meant else None
        if tier == MEMORY and DISK in current.meant:
            self._to_disk.offer(job)
        elif tier == DISK:
            self._on_disk(job)

    def _take(self, follower: Follower) -> None:
        """Report the copy that ended in a farther tier."""
        job, save = follower.take()
        if save.lost is not None:
            raise save.lost
        if save.result is None:
            self._ended.append(Failed(step=job.step, why=save.fault or "unknown", tier=follower.tier))
            return
        self._cadence.took(follower.tier, save.seconds)
        where = self._remote.where(job.step) if self._remote and follower is self._to_remote else save.result.path
        self._ended.append(
            Saved(
                step=job.step,
                path=str(where),
                size_bytes=job.manifest.size_bytes,
                seconds=save.began + save.seconds - job.began,
                tier=follower.tier,
                kept=follower is self._to_disk,
                warning=save.warning,
            )
        )
        if follower is self._to_disk:
            self._on_disk(replace(job, source=save.result.path))

    def _on_disk(self, job: Job) -> None:
        self._kept_step = job.step
        if REMOTE in job.meant:
            self._to_remote.offer(job)
        if self._stale is not None:
            # It would pass for the newest where the disk cannot be read.
            self._stale.drop()
            self._stale = None

    def _drain_ended(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        return ended

    def _lock_disk(self) -> str | None:
        """Claim the lock of the folder; returns why it cannot be claimed now. LockHeld where another run has it."""
        try:
            retry(lambda: self._disk.fence.check(group=self._group), self._disk.retries)
        except SaveError as error:
            return str(error)
        return None

    # Choice of tiers

    def _readable(self) -> list[ReadableTier]:
        """Tiers to load from, nearest first."""
        tiers: list[ReadableTier | None] = [self._memory, self._disk, self._remote]
        return [tier for tier in tiers if tier is not None]

    def _new_cadence(self) -> Cadence:
        names = [tier.name for tier in self._readable()]
        return Cadence(self._config, names, replicated=self._memory is not None and self._memory.nodes > 1)

    def _plan_cadence(self) -> None:
        reckoned = rank_sync.on_first(self._cadence.reckon)
        if reckoned is not None:
            self._cadence.adopt(reckoned)

    def _leave_memory(self) -> None:
        """Stop saving to memory after several refusals in a row, and derive the bound without it."""
        self._run.say(f"no more saves to memory, only to {self._disk}")
        self._stale, self._memory, self._first.memory = self._memory, None, None
        cadence, self._cadence = self._cadence, self._new_cadence()
        self._cadence.follow(cadence)

    def _catch_up(self, step: int) -> None:
        """Upload a step that the run before this one had no time to upload."""
        if self._remote is None:
            return
        try:
            if step in self._remote.list_steps():
                return
        except rank_sync.RankError:
            return  # reported when the tiers were listed
        path = manifests.path_of(self._disk.folder, step)
        manifest = rank_sync.on_first(lambda: manifests.read(path))
        job = Job(step=step, source=path, meant={REMOTE}, manifest=manifest, began=time.perf_counter())
        self._to_remote.offer(job)
