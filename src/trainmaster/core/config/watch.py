"""Detection of bad steps and stragglers, and experiment trackers."""

from __future__ import annotations

from dataclasses import dataclass

from trainmaster.core.schema import field


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchConfig:
    """Bad steps are skipped; after several in a row the run rolls back to a checkpoint."""

    max_skipped: int = field(default=5, ge=1, doc="bad steps in a row before the run rolls back to a checkpoint")
    max_rollbacks: int = field(default=3, ge=0, doc="rollbacks before the run fails; 0: it fails at once")
    spike_history: int = field(
        default=64,
        ge=8,
        most=1_000_000,
        doc="number of good steps that a spike is judged by; with fewer, no step is a spike",
    )
    loss_spike: float | None = field(
        default=10.0,
        gt=0,
        doc="robust deviations above the recent median at which a loss is bad; null: only NaN and inf",
    )
    grad_spike: float | None = field(default=50.0, gt=0, doc="the same for the gradient norm; null: only NaN and inf")
    straggler_share: float = field(
        default=0.15,
        gt=0,
        doc="excess over the median of all ranks at which a rank is a straggler, as a share of a step",
    )
    straggler_readings: int = field(default=3, ge=1, doc="readings in a row before a straggler is reported")
    tensorboard: str | None = field(default=None, doc="folder for TensorBoard's event files")
    wandb_project: str | None = field(default=None, doc="Weights & Biases project; needs `pip install wandb`")
    mlflow_uri: str | None = field(default=None, doc="MLflow tracking store; needs `pip install mlflow-skinny`")
