"""Learning rate of every step. Pure: used by the trainer at each step and by `trainmaster plan` without torch.

It depends on the config, the step and, for `plateau` only, on the evaluations so far: a resumed run has the rates of
the run it resumes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainmaster.core.config.optimizer import OptimizerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Plateau:
    """State of the `plateau` schedule. Part of the run's saved state."""

    best: float | None = None  # lowest evaluation loss
    flat: int = 0  # evaluations since then, or since the last cut
    cuts: int = 0

    def after(self, loss: float, config: OptimizerConfig) -> Plateau:
        """One more evaluation. A loss that is no number is no improvement."""
        if math.isfinite(loss) and (self.best is None or loss < self.best * (1 - config.plateau_threshold)):
            return Plateau(best=loss, cuts=self.cuts)
        if self.flat + 1 < config.plateau_patience:
            return Plateau(best=self.best, flat=self.flat + 1, cuts=self.cuts)
        return Plateau(best=self.best, cuts=self.cuts + 1)


def learning_rate(config: OptimizerConfig, *, step: int, steps: int, plateau: Plateau | None = None) -> float:
    """Learning rate of step `step` (from 0) in a run of `steps`; never above the peak."""
    if step < config.warmup_steps:
        return config.lr * ((step + 1) / config.warmup_steps)  # in this order: rounded, it never exceeds the peak
    least = config.min_lr_ratio
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "plateau":
        return config.lr * max(least, config.plateau_factor ** (plateau.cuts if plateau is not None else 0))
    done = _progress(config, step=step, steps=steps)
    if config.schedule == "exponential":
        return config.lr * float(least**done)
    shape = config.decay_shape if config.schedule == "wsd" else config.schedule
    return config.lr * (least + (1 - least) * _share(shape, done))


def _progress(config: OptimizerConfig, *, step: int, steps: int) -> float:
    """Progress of the decay, 0 to 1. The last step of the decay has the last rate."""
    first, last = config.warmup_steps, steps - 1
    if config.schedule == "wsd":
        # A tenth is what Hägele et al. found enough (arXiv 2405.18392); the tail begins on the level part.
        tail = config.decay_steps or min(max(1, steps // 10), steps - config.warmup_steps)
        first = last - tail
    elif config.decay_steps is not None:
        last = first + config.decay_steps
    return min(1.0, max(0.0, (step - first) / max(1, last - first)))


def _share(shape: str, done: float) -> float:
    """Remaining share of the decay from the peak to the last rate."""
    if shape == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    # 1 - sqrt: fast at first, slow at the end; the best of the tails that Hägele et al. compared.
    return 1 - math.sqrt(done) if shape == "sqrt" else 1 - done
