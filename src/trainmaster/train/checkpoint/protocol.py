"""Interface between the training loop and its checkpoints: resume, save, poll, finish.

A save begins at a step boundary and ends at a later one. Training goes on in between: `before_update` orders the next
update behind the copy, and `look` returns at each step boundary, on every rank alike, the saves that ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trainmaster.core.config.train import TrainConfig
from trainmaster.models.decoder import Decoder
from trainmaster.train.checkpoint.tiers.loss_bound import Bound
from trainmaster.train.feed import Feed
from trainmaster.train.parallel.shard import World
from trainmaster.train.state import State


class Rejected(Protocol):
    """Callback for each checkpoint that cannot be trusted and each tier that cannot be read."""

    def __call__(self, path: str, why: str, tier: str = "disk") -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The training run that is saved and restored, and the identity that a checkpoint must share with it."""

    config: TrainConfig
    world: World
    model: Decoder
    optimizer: torch.optim.AdamW
    feed: Feed
    identity: Mapping[str, Any]  # the model and the data, as in Manifest.run
    rejected: Rejected
    say: Callable[[str], None] = print  # writes one log line
    beside_load: Callable[[Future[None]], None] | None = None  # called on all ranks while the first load is under way


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint that the run now continues from."""

    state: State
    path: str  # a folder, or the URL of one
    seconds: float
    feed: Mapping[str, Any] | None = None  # of a data source that has a state of its own
    tier: str = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A committed checkpoint. Each tier reports its own commit."""

    step: int
    path: str  # a folder, or the URL of one
    size_bytes: int
    seconds: float  # from the step boundary to the commit
    tier: str = "disk"
    stall_s: float = 0.0  # time that training was held for it
    kept: bool = True  # whether the run may end with it: memory can vanish, and a copy of a copy adds nothing
    warning: str | None = None  # a fault beside it: old checkpoints could not be deleted


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A save that failed after all its attempts; earlier checkpoints are unchanged."""

    step: int
    why: str
    tier: str = "disk"


Ended = Saved | Failed


class Checkpoints(Protocol):
    """The checkpoints of a run. Every method is called on all ranks alike, from the thread that trains."""

    def resume(self) -> Loaded | None:
        """Fill model and optimizer from the newest good checkpoint; None only where there has never been one."""

    def save(self, state: State) -> None:
        """Begin a save of this step. Not while `busy`, unless the config lets training wait for its turn."""

    def before_update(self) -> None:
        """Called right before the weights change; orders the update behind the copy of the save under way."""

    def collect_finished(self) -> list[Ended]:
        """Saves that ended since the last call. Cheap, called at each step boundary, the same on all ranks."""

    def hold(self, least: int) -> list[Ended]:
        """Wait for the save under way if a process that dies now would resume from before step `least`."""

    def finish(self, patience_s: float | None = None) -> list[Ended]:
        """Wait for all saves under way; with `patience_s`, at most that long for other ranks.

        Also called, with a patience, while an exception leaves the loop: it must not need the training group.
        """

    def close(self) -> None:
        """Release the lock of the folder. The last call, on the way out of success or failure; no collectives."""

    @property
    def busy(self) -> bool:
        """A save is under way; one that is due now waits for a later step boundary. The same on all ranks."""

    def due(self, step: int) -> bool:
        """Whether a save should begin at this step."""

    @property
    def every_steps(self) -> int:
        """Steps between saves, as planned now."""

    @property
    def bound(self) -> Bound | None:
        """Steps and time that a crash can cost at most; None until it is measured."""
