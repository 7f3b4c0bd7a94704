"""Optimizer settings: AdamW and the learning-rate schedule (computed in `core/config/schedule.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trainmaster.core.errors import Fault
from trainmaster.core.schema import field

Schedule = Literal["constant", "linear", "cosine", "exponential", "plateau", "wsd"]
_DECAYING = ("linear", "cosine", "exponential", "wsd")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up to the peak learning rate, then a schedule."""

    lr: float = field(
        default=3e-3,
        gt=0,
        le=1,
        doc="peak learning rate; not stated: that published for model.preset, else by the model's width",
        default_text="published, or min(0.003, 1.2288 / width)",
    )
    schedule: Schedule = field(
        default="cosine",
        doc="way down from the peak; plateau: a cut where evaluations stop improving; wsd: level, then a tail",
    )
    min_lr_ratio: float = field(default=0.1, ge=0, le=1, doc="last learning rate over the peak; constant has none")
    warmup_steps: int = field(
        default=10, ge=0, doc="steps from zero to the peak", default_text="min(2000, max(10, steps / 50)), below steps"
    )
    decay_steps: int | None = field(
        default=None,
        ge=1,
        doc="steps from the peak to the last rate; not stated: all after warm-up, with wsd the last tenth of the run",
    )
    decay_shape: Literal["linear", "sqrt", "cosine"] = field(default="linear", doc="of wsd's tail")
    plateau_patience: int = field(
        default=3, ge=1, doc="evaluations in a row without improvement that cut the learning rate"
    )
    plateau_factor: float = field(default=0.5, gt=0, le=0.99, doc="learning rate after a cut over the one before")
    plateau_threshold: float = field(
        default=1e-3, ge=0, le=0.5, doc="share of the best evaluation loss that counts as an improvement"
    )
    weight_decay: float = field(default=0.1, ge=0, le=100, doc="of matrices; never of norms")
    beta1: float = field(default=0.9, ge=0, le=0.9999, doc="first moment")
    beta2: float = field(default=0.95, ge=0, le=0.99999, doc="second moment")
    grad_clip: float = field(default=1.0, gt=0, doc="largest global gradient norm")

    def faults(self) -> Iterator[Fault]:
        if self.decay_steps is not None and self.schedule not in _DECAYING:
            message = f"means nothing with schedule {self.schedule}; leave it out, or use one of {', '.join(_DECAYING)}"
            yield Fault(path="decay_steps", message=message)
        if self.schedule == "exponential" and self.min_lr_ratio == 0:
            yield Fault(path="min_lr_ratio", message="an exponential never reaches 0; use 0.01, or schedule: linear")

    def faults_over(self, steps: int, *, evaluates: bool) -> Iterator[Fault]:
        """What is wrong with it in a run of that many steps."""
        if self.warmup_steps >= steps:
            message = f"{self.warmup_steps} does not end before steps {steps}; use {steps // 10}"
            yield Fault(path="warmup_steps", message=message)
        elif self.schedule == "wsd" and self.decay_steps is not None and self.decay_steps > steps - self.warmup_steps:
            left = steps - self.warmup_steps
            message = f"{self.decay_steps} is more than the {left} steps after warm-up; use {max(1, steps // 10)}"
            yield Fault(path="decay_steps", message=message)
        if self.schedule == "plateau" and not evaluates:
            yield Fault(path="schedule", message="plateau needs evaluations; set eval_sequences, or use cosine")
