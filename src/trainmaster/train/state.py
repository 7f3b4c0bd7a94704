"""State of a run besides weights: step, next sample, losses so far.

Random numbers need no saving: every step draws from (seed, step, rank) anew.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch

from trainmaster.core.config.optimizer import OptimizerConfig
from trainmaster.core.config.schedule import Plateau
from trainmaster.core.schema import field
from trainmaster.train.experiment import Experiment
from trainmaster.train.watch.bad_steps import History, Range


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """After `step` steps. Saved as JSON in the checkpoint's manifest, so that anyone can read it without torch."""

    step: int = field(default=0, ge=0, doc="steps done")
    cursor: int = field(default=0, ge=0, doc="the next training sample, counted over all ranks")
    epoch: int = field(default=0, ge=0, doc="epochs closed")
    epoch_end: int = field(default=0, ge=0, doc="the step that closed the last one")
    epoch_losses: int = field(default=0, ge=0, doc="losses of the epoch under way: one a step, but for skipped ones")
    epoch_loss_sum: float = 0.0
    loss_first: float | None = None
    loss_last: float | None = None
    plateau: Plateau = Plateau()  # evaluations so far, for the learning rate
    history: History = History()  # the newest good steps, by which a bad one is recognised
    passed_over: tuple[Range, ...] = ()  # samples that made the run sick before it went back
    rollbacks: int = field(default=0, ge=0, doc="times the run went back")
    experiment: Experiment | None = None  # None: saved by a version that did not record it

    def after_step(self, *, samples: int) -> State:
        """One step on; its loss comes later."""
        return replace(self, step=self.step + 1, cursor=self.cursor + samples)

    def after_loss(self, loss: float) -> State:
        """The loss of a step is known; a step that moved nothing has none."""
        return replace(
            self,
            epoch_losses=self.epoch_losses + 1,
            epoch_loss_sum=self.epoch_loss_sum + loss,
            loss_first=loss if self.loss_first is None else self.loss_first,
            loss_last=loss,
        )

    def after_epoch(self) -> State:
        return replace(self, epoch=self.epoch + 1, epoch_end=self.step, epoch_losses=0, epoch_loss_sum=0.0)

    def after_evaluation(self, loss: float, config: OptimizerConfig) -> State:
        return replace(self, plateau=self.plateau.after(loss, config))

    @property
    def epoch_mean(self) -> float | None:
        return self.epoch_loss_sum / self.epoch_losses if self.epoch_losses else None


def seed_step(seed: int, step: int, rank: int) -> None:
    """Set every random generator for this step on this rank; a resumed run draws what the first would have drawn."""
    digest = hashlib.sha256(f"step {seed} {step} {rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
