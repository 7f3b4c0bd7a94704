"""Checkpoints in several tiers: the memory of the nodes, the disk that they share, an object store.

    training ─copy─▶ memory of this node ─▶ memory of the next node ─▶ disk ─▶ object store
                     └─ committed when every file is on two nodes       └─ each a copy of the same files, manifest last

A tier is fed by the one before it, and never has a step that the one before it had not. That is what a resume rests on
when a tier cannot be asked: what is newest and good in a nearer tier is not older than anything farther away. (Only one
who puts older files into a folder breaks that.)

Each tier works in a thread of its own with a group of its own. What one has committed, the next takes over at the next
step boundary; a tier that is still busy then takes the newest that waits for it.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict

from trainmaster.train.checkpoint import manifest as manifests
from trainmaster.train.checkpoint.layout import INDEX
from trainmaster.train.checkpoint.load import Folder, Loaded, Place, as_of_today, must_match
from trainmaster.train.checkpoint.manager import Ended, Failed, OnDisk, Run, Saved
from trainmaster.train.checkpoint.manifest import FileRecord, Manifest
from trainmaster.train.checkpoint.save import Content, Save, SaveError, Written, describe, retry, write_files
from trainmaster.train.checkpoint.tiers import memory
from trainmaster.train.checkpoint.tiers.cadence import Pace
from trainmaster.train.checkpoint.tiers.follower import Follower, Job
from trainmaster.train.checkpoint.tiers.loss_bound import DISK, MEMORY, REMOTE, Bound
from trainmaster.train.checkpoint.tiers.memory_to_disk import copy_to_disk
from trainmaster.train.checkpoint.tiers.remote import Remote
from trainmaster.train.checkpoint.tiers.replicas import Replicas
from trainmaster.train.parallel import rank_sync
from trainmaster.train.state import State

_TIMEOUT = timedelta(hours=6)  # of an upload by the slowest rank
_FRAMES_BYTES = 1 << 20  # what stands around the tensors in the files of one rank, at most
_REFUSALS = 3  # in a row, and memory is not asked again: a bound that counts on it would be no bound
_STOP_S = 20.0  # Kubernetes gives 30 s from SIGTERM to SIGKILL, and disk and memory come first
_UPLOADS, _UPLOAD_PAUSE_S = 4, 5.0  # attempts at one step, and the pause before the second; it doubles


class Tiered(OnDisk):
    """The face of OnDisk, with more tiers behind it where the config has them."""

    def __init__(self, run: Run, folder: Path) -> None:
        super().__init__(run, folder)
        remote, self._remote = self._config.remote, None
        self._memory = self._open_memory()
        if remote is not None:
            self._remote = Remote(remote.url, disk=folder, uploads=_group(), asks=_group())
        self._pace = self._new_pace()
        self._copies = _group() if self._memory is not None else None
        self._to_disk = Follower(DISK, self._copy_to_disk)
        self._to_remote = Follower(REMOTE, self._upload)
        self._meant: set[str] = set()  # tiers that the save under way goes to
        self._mine: Mapping[str, FileRecord] = {}  # files that this rank has written in it
        self._kept_step = 0  # the newest on the disk
        self._refused = 0  # saves in a row that memory could not take
        self._stale: Replicas | None = None  # memory that is no longer saved to
        self._ending = threading.Event()
        self._is_last = False  # the save under way began after the end had come

    @property
    def bound(self) -> Bound | None:
        return self._pace.bound

    @property
    def every_steps(self) -> int:
        return self._pace.every_steps

    def due(self, step: int) -> bool:
        return self._pace.due(step)

    def resume(self) -> Loaded | None:
        self._drain()  # after a rollback one may still be under way, and be the newest
        self._ending.clear()  # what ended was only the way that led astray
        self._is_last = False
        found = super().resume()
        self._pace.start(found.state.step if found is not None else 0)
        if found is not None and found.tier == DISK:
            self._catch_up(found.state.step)
        return found

    def save(self, state: State) -> None:
        self._wait()
        # The last one, and that of a run which is told to stop, must get as far as it can.
        self._is_last = self._ending.is_set() or state.step == self._run.config.steps
        self._meant = self._pace.begin(state.step, all_tiers=self._is_last)
        super().save(state)

    def look(self) -> list[Ended]:
        self._pace.tick()
        flying = [self._save, self._to_disk.save, self._to_remote.save]
        if any(save is not None for save in flying):
            going = rank_sync.any_of([save is not None and not save.done for save in flying])
            over = [save is not None and not on for save, on in zip(flying, going, strict=True)]
            if over[0]:
                self._collect()
            for follower, is_over in zip((self._to_disk, self._to_remote), over[1:], strict=True):
                if is_over:
                    self._take(follower)
            if any(over):
                self._reckon()
        return self._told()

    def finish(self, patience_s: float | None = None) -> list[Ended]:
        # Asked a second time, the step that was saved last is the run's last, though its save began as any other.
        self._is_last |= self._ending.is_set()
        self._ending.set()
        self._drain(patience_s)
        is_over = self._step == self._kept_step == self._run.config.steps
        # Nobody waits for a distant store on the way out of a failure, nor while the last step is still to be saved.
        while self._is_last and patience_s is None and self._to_remote.save is not None:
            if not self._to_remote.save.ends_within(None if is_over else _STOP_S):
                why = "told to stop before it was there; it is on the disk, and the next run uploads it"
                self._ended.append(Failed(step=self._step, why=why, tier=REMOTE))
                break
            self._take(self._to_remote)
        if is_over and self._memory is not None:
            self._memory.drop()
        return self._told()

    def _drain(self, patience_s: float | None = None) -> None:
        """Until what was begun is on the disk."""
        self._wait(patience_s)
        while self._to_disk.save is not None and self._to_disk.save.wait(patience_s):
            self._take(self._to_disk)

    def _catch_up(self, step: int) -> None:
        """Upload what a run before this one had no time to."""
        if self._remote is None:
            return
        try:
            if step in self._remote.list_steps():
                return
        except rank_sync.RankError:
            return  # it has been told of as it was looked for checkpoints
        path = manifests.path_of(self._folder, step)
        manifest = rank_sync.on_first(lambda: manifests.read(path))
        job = Job(step=step, source=path, meant={REMOTE}, manifest=manifest, began=time.perf_counter())
        self._to_remote.offer(job)

    def _open_memory(self) -> Replicas | None:
        run, config = self._run, self._config.memory
        if config.use == "off":
            return None
        folder = memory.folder_of(self._folder, config=config.folder, environ=os.environ)
        # A run that had more nodes may have left its newest step in the memory of the one that is left.
        if config.use == "auto" and run.world.rank_info.nodes < 2 and not rank_sync.any_rank(folder.exists()):
            return None
        try:
            opened = Replicas(folder, group=self._group, check=self._must_match, needs=self._needs)
        except rank_sync.RankError as wrong:
            run.say(f"no saves to memory, only to {self._folder}: {wrong}")
            return None
        if opened.nodes == 1:
            run.say(f"saves to memory ({folder}) have no second node to be copied to: they outlive processes alone")
        return opened

    def _new_pace(self) -> Pace:
        names = [MEMORY] if self._memory is not None else []
        names += [DISK] if self._remote is None else [DISK, REMOTE]
        return Pace(self._config, names, replicated=self._memory is not None and self._memory.nodes > 1)

    def _places(self) -> list[Place]:
        found: list[Place] = [Folder(self._folder)]
        if self._memory is not None:
            found.insert(0, self._memory)
        if self._remote is not None:
            found.append(self._remote)
        return found

    def _must_match(self, manifest: Manifest) -> None:
        where = f"step {manifest.step} in memory"
        must_match(where, as_of_today(where, manifest.run), self._run.identity)

    def _needs(self, path: Path) -> set[str]:
        """Files of a checkpoint, of which only the index is there yet, that this rank fills its tensors from."""
        index = pickle.loads((path / INDEX).read_bytes())  # noqa: S301 (its hash has been verified)
        weights, moments = get_state_dict(self._run.model, self._run.optimizer)
        planner = DefaultLoadPlanner()
        planner.set_up_planner({"model": weights, "optimizer": moments}, index, is_coordinator=False)
        return {index.storage_data[item.storage_index].relative_path for item in planner.create_local_plan().items}

    def _in_use(self) -> Collection[int]:
        return self._to_remote.steps

    def _write(self, save_: Save, content: Content) -> None:
        """In the background, on every rank: to memory, or to the disk where there is none or it has no room."""
        if self._memory is None:
            super()._write(save_, content)
            return
        step, layout = content.state.step, self._layout
        assert layout is not None

        def write(path: Path) -> Mapping[str, FileRecord]:
            self._mine = write_files(path, content, layout, threads=self._threads)
            save_.written.set()
            return self._mine

        try:
            manifest = self._memory.save(
                step,
                size_bytes=sum(tensor.nbytes for tensor in content.tensors) + _FRAMES_BYTES,
                write=write,
                describe=lambda parts: describe(content, parts),
                spare=self._to_disk.steps,
            )
            save_.result = Written(path=Path(self._memory.where(step)), manifest=manifest)
        except rank_sync.RankError as wrong:
            if DISK not in self._meant:
                raise SaveError(f"{wrong}; the next one on disk comes all the same") from wrong
            super()._write(save_, content)
            self._memory.forget(before=step)  # or it would pass for the newest where the disk cannot be asked
            save_.warning = f"step {step} went to the disk alone, memory could not take it: {wrong}"

    def _collect(self) -> None:
        assert self._save is not None
        save_, meant = self._save, self._meant
        super()._collect()
        ended, in_memory = self._ended.pop(), self._in_memory(save_)
        tier = MEMORY if in_memory else DISK
        self._refused = 0 if in_memory and save_.result is not None else self._refused + 1
        if isinstance(ended, Failed) or save_.result is None:
            self._ended.append(replace(ended, tier=tier))
        else:
            self._ended.append(replace(ended, tier=tier, kept=not in_memory))
            self._hand_on(save_, save_.result, tier, meant)
        if self._memory is not None and self._refused == _REFUSALS:
            self._leave_memory()

    def _hand_on(self, save_: Save, result: Written, tier: str, meant: set[str]) -> None:
        """What has been committed goes to the next tier, if it was meant to."""
        step = result.manifest.step
        self._pace.took(tier, save_.seconds)
        job = Job(
            step=step, source=result.path, meant=meant, manifest=result.manifest, mine=self._mine, began=save_.began
        )
        if tier == MEMORY and DISK in meant:
            self._to_disk.offer(job)
        elif tier == DISK:
            self._on_disk(job)

    def _on_disk(self, job: Job) -> None:
        self._kept_step = job.step
        if REMOTE in job.meant:
            self._to_remote.offer(job)
        if self._stale is not None:
            # Or it would pass for the newest where the disk cannot be asked.
            self._stale.drop()
            self._stale = None

    def _leave_memory(self) -> None:
        """Memory has refused a few times in a row. Without it the bound must be reckoned anew."""
        self._run.say(f"no more saves to memory, only to {self._folder}")
        self._stale, self._memory = self._memory, None
        pace, self._pace = self._pace, self._new_pace()
        self._pace.follow(pace)

    def _in_memory(self, save_: Save) -> bool:
        if save_.result is None:
            return self._memory is not None and DISK not in self._meant
        return save_.result.path.parent != self._folder

    def _copy_to_disk(self, job: Job, save_: Save) -> None:
        """In the background, on every rank."""
        save_.result = retry(
            lambda: copy_to_disk(job.source, self._folder, job.manifest, job.mine, group=self._copies), self._retries
        )
        save_.written.set()
        save_.warning = self._prune(job.step, group=self._copies)

    def _upload(self, job: Job, save_: Save) -> None:
        """In the background, on every rank. A store that is down is tried again, and later with a newer step."""
        remote, config = self._remote, self._config.remote
        assert remote is not None and config is not None
        for attempt in range(_UPLOADS):
            try:
                save_.warning = remote.upload(job.step, keep=config.keep)
                save_.result = Written(path=Path(), manifest=job.manifest)
                return
            except rank_sync.RankError as wrong:
                if attempt + 1 == _UPLOADS or remote.agreed(self._ending.is_set):
                    raise SaveError(f"{wrong} ({attempt + 1} attempts)") from wrong
                self._ending.wait(_UPLOAD_PAUSE_S * 2**attempt)

    def _take(self, follower: Follower) -> None:
        job, save_ = follower.take()
        if save_.result is None:
            self._ended.append(Failed(step=job.step, why=save_.fault or "unknown", tier=follower.tier))
            return
        self._pace.took(follower.tier, save_.seconds)
        where = self._remote.where(job.step) if self._remote and follower is self._to_remote else save_.result.path
        self._ended.append(
            Saved(
                step=job.step,
                path=str(where),
                size_bytes=job.manifest.size_bytes,
                seconds=save_.began + save_.seconds - job.began,
                tier=follower.tier,
                kept=follower is self._to_disk,
                warning=save_.warning,
            )
        )
        if follower is self._to_disk:
            self._on_disk(replace(job, source=save_.result.path))

    def _reckon(self) -> None:
        found = rank_sync.on_first(self._pace.reckon)
        if found is not None:
            self._pace.adopt(found)

    def _told(self) -> list[Ended]:
        told, self._ended = self._ended, []
        return told


def _group() -> dist.ProcessGroup:
    """For one tier's threads alone: in one group ranks must agree on the order of their calls."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    return group
