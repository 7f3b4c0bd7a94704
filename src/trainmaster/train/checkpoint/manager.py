"""What the loop knows of checkpoints: resume, save, look, finish. Where they go is behind this face.

A save is begun at a step boundary and ends at a later one. In between training goes on: `before_update` holds it back
only until the copy is off the device, and `look` tells at each step boundary, on every rank alike, what has ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor

from trainmaster.core.errors import CheckpointError
from trainmaster.core.train_config import TrainConfig
from trainmaster.models.llama import Llama
from trainmaster.node.host import Host
from trainmaster.train.checkpoint.host_copy import Stage
from trainmaster.train.checkpoint.layout import Layout
from trainmaster.train.checkpoint.load import Folder, Loaded, Place, Rejected, load_newest
from trainmaster.train.checkpoint.provenance import trace
from trainmaster.train.checkpoint.save import Content, Retries, Save, prune, save
from trainmaster.train.checkpoint.tiers.loss_bound import Bound
from trainmaster.train.feed import Feed
from trainmaster.train.parallel import rank_sync
from trainmaster.train.parallel.shard import World
from trainmaster.train.state import State

_BACKGROUND_TIMEOUT = timedelta(hours=1)
_THREADS = 8  # at 0.5 to 2 GB/s of SHA-256 each, more than most disks take


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is saved and filled, and what a checkpoint must share with it."""

    config: TrainConfig
    world: World
    model: Llama
    optimizer: torch.optim.AdamW
    feed: Feed
    identity: Mapping[str, Any]  # the model and the data, as in Manifest.run
    rejected: Rejected  # told of each checkpoint that could not be trusted
    say: Callable[[str], None] = print  # a line for people


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A committed checkpoint. With several tiers each of them says so by itself."""

    step: int
    path: str  # a folder, or the URL of one
    size_bytes: int
    seconds: float  # from the step boundary to the commit
    tier: str = "disk"
    stall_s: float = 0.0  # how long training was held for it
    kept: bool = True  # whether the run may end with this; memory can vanish, and a copy of a copy adds nothing
    warning: str | None = None  # what went wrong beside it: old ones could not be deleted


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A save that did not happen, after all its attempts; what was saved before is as it was."""

    step: int
    why: str
    tier: str = "disk"


Ended = Saved | Failed


class Checkpoints(Protocol):
    """The face. Every method is called on all ranks alike, from the thread that trains."""

    def resume(self) -> Loaded | None:
        """Fill model and optimizer from the newest good checkpoint; None only where there has never been one."""

    def save(self, state: State) -> None:
        """Begin a save of this step. Never while `busy`, unless the config has training wait for its turn."""

    def before_update(self) -> None:
        """Called right before the weights change; returns once the save no longer needs them as they are."""

    def look(self) -> list[Ended]:
        """What has ended since the last look: cheap, at each step boundary, the same on all ranks."""

    def hold(self, least: int) -> list[Ended]:
        """Wait for a save under way, where a process that dies would have less than this step to go on from."""

    def finish(self, patience_s: float | None = None) -> list[Ended]:
        """Wait for all that is under way; given a patience, not longer than that for other ranks.

        Also called, with a patience, on the way out of an exception: it must not need the group that trains.
        """

    @property
    def busy(self) -> bool:
        """A save is under way; one that is due now waits for a later step boundary. The same on all ranks."""

    def due(self, step: int) -> bool:
        """Whether a save should begin at this step."""

    @property
    def every_steps(self) -> int:
        """Steps between saves, as it is planned now."""

    @property
    def bound(self) -> Bound | None:
        """What a crash can cost at most; None until it is measured."""


class OnDisk:
    """Checkpoints in a folder that all nodes share."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._run, self._folder = run, folder
        self._config = run.config.checkpoint
        # Its own timeout: a slow disk is no dead peer. Training never waits in a collective for a writer.
        self._group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_BACKGROUND_TIMEOUT)
        self._origin = trace(run.config, run.world.rank_info, Host(), group=self._group)
        self._stage = Stage(run.world.device, _sizes(run.optimizer))
        self._threads = max(1, min(_THREADS, len(os.sched_getaffinity(0)) // run.world.rank_info.local_world_size))
        self._retries = Retries(count=self._config.retries, pause_s=self._config.retry_s)
        self._layout: Layout | None = None
        self._save: Save | None = None
        self._step = 0
        self._committed = 0  # the newest step that a process which dies leaves behind
        self._held_s = 0.0
        self._ended: list[Ended] = []

    def resume(self) -> Loaded | None:
        self._wait()  # after a rollback one may still be under way, and be the newest
        run = self._run
        found = load_newest(
            self._places(),
            run=run.identity,
            model=run.model,
            optimizer=run.optimizer,
            rejected=run.rejected,
            threads=self._threads,
        )
        if found is not None and found.feed is not None:
            restore(run.feed, found.feed)
        self._committed = found.state.step if found is not None else 0
        return found

    def save(self, state: State) -> None:
        started = time.perf_counter()
        self._wait()
        self._step = state.step
        content = self._copy(state)
        self._save = Save(lambda save: self._write(save, content))
        if self._config.mode == "sync":
            self._save.wait()
        self._held_s = time.perf_counter() - started

    def before_update(self) -> None:
        self._stage.fence()

    def look(self) -> list[Ended]:
        if self._save is not None and not rank_sync.any_rank(not self._save.done):
            self._collect()
        ended, self._ended = self._ended, []
        return ended

    def hold(self, least: int) -> list[Ended]:
        if self._save is None or self._committed >= least:
            return []
        started = time.perf_counter()
        self._save.wait()
        self._held_s += time.perf_counter() - started  # before it is collected: it is told with the save
        self._wait()
        ended, self._ended = self._ended, []
        return ended

    def finish(self, patience_s: float | None = None) -> list[Ended]:
        self._wait(patience_s)
        ended, self._ended = self._ended, []
        return ended

    @property
    def busy(self) -> bool:
        return self._save is not None and self._config.mode == "async"

    def _copy(self, state: State) -> Content:
        """Begin to copy this rank's part of the run as it is now."""
        run = self._run
        weights, moments = get_state_dict(run.model, run.optimizer)
        tree = {"model": weights, "optimizer": moments}
        if self._layout is None:
            self._layout = Layout(tree, group=self._group, files=self._threads)
        tensors, things = self._layout.pick(tree)
        copies: list[Tensor] = []
        fault: MemoryError | None = None
        try:
            copies = self._stage.copy(tensors)
        except MemoryError as wrong:
            fault = wrong  # of this rank alone, perhaps: all hear of it where they all meet, before anything is written

        def arrived() -> None:
            if fault is not None:
                raise fault
            self._stage.wait()

        return Content(
            state=state,
            run=run.identity,
            feed=state_of(run.feed, state.cursor),
            origin={**self._origin, "begun_at": datetime.now(UTC).isoformat()},
            tensors=copies,
            things=things,
            arrived=arrived,
        )

    def _write(self, save_: Save, content: Content) -> None:
        """In the background, on every rank."""
        assert self._layout is not None
        save_.result = save(
            self._folder,
            content,
            self._layout,
            group=self._group,
            retries=self._retries,
            threads=self._threads,
            written=save_.written,
        )
        save_.warning = self._prune(content.state.step, group=self._group)

    def _prune(self, newest: int, *, group: dist.ProcessGroup | None) -> str | None:
        keep, keep_every = self._config.keep, self._config.keep_every_steps
        return prune(self._folder, keep=keep, keep_every=keep_every, newest=newest, spare=self._in_use(), group=group)

    def _places(self) -> list[Place]:
        """Where checkpoints may be, nearest first."""
        return [Folder(self._folder)]

    def _in_use(self) -> Collection[int]:
        """Steps that must not be deleted now."""
        return ()

    def _wait(self, patience_s: float | None = None) -> None:
        """Until nothing is under way. Asks nobody: every rank's thread ends with the same result."""
        if self._save is not None and self._save.wait(patience_s):
            self._collect()

    def _collect(self) -> None:
        assert self._save is not None
        save_, self._save = self._save, None
        if save_.result is None:
            self._ended.append(Failed(step=self._step, why=save_.fault or "unknown"))
            return
        self._committed = self._step
        self._ended.append(
            Saved(
                step=self._step,
                path=str(save_.result.path),
                size_bytes=save_.result.manifest.size_bytes,
                seconds=save_.seconds,
                stall_s=self._held_s + self._stage.held_s(),
                warning=save_.warning,
            )
        )


def open_checkpoints(run: Run, folder: Path) -> Checkpoints:
    """The kind that the config asks for."""
    if run.config.checkpoint.managed is not None:
        from trainmaster.train.checkpoint.managed.checkpoints import Managed

        return Managed(run, run.config.checkpoint.managed)
    from trainmaster.train.checkpoint.tiers.tiered import Tiered

    return Tiered(run, folder)


def _sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    """Bytes of each tensor that AdamW's run will have: a weight, its two moments, its count of steps."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    shards = [(weight.to_local() if isinstance(weight, DTensor) else weight).nbytes for weight in weights]
    return [size for shard in shards for size in (shard, shard, shard, 4)]


def state_of(feed: object, cursor: int) -> Mapping[str, Any] | None:
    """Of a feed that has a state of its own. Asked on all ranks alike."""
    state: Mapping[str, Any] | None = feed.state(cursor) if hasattr(feed, "state") else None
    return state


def restore(feed: object, state: Mapping[str, Any]) -> None:
    if not hasattr(feed, "restore"):
        raise CheckpointError("the checkpoint holds the state of its data source, and this data source takes none")
    feed.restore(state)
