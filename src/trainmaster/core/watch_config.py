"""What a run watches itself for, and where its numbers go besides the events."""

from __future__ import annotations

from dataclasses import dataclass

from trainmaster.core.schema import field


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchConfig:
    """Sick steps are skipped; after a few of them the run goes back to where it was well."""

    max_skipped: int = field(default=5, ge=1, doc="sick steps in a row before the run goes back to a checkpoint")
    max_rollbacks: int = field(default=3, ge=0, doc="times it goes back before it fails; 0: it fails at once")
    spike_history: int = field(
        default=64, ge=8, doc="healthy steps a spike is judged by; before there are so many, none is called"
    )
    loss_spike: float | None = field(
        default=10.0,
        gt=0,
        doc="a loss so many robust deviations above the recent median is sick; null: only NaN and inf",
    )
    grad_spike: float | None = field(
        default=50.0, gt=0, doc="a gradient norm so many robust deviations above it is sick; null: only NaN and inf"
    )
    straggler_share: float = field(
        default=0.15, gt=0, doc="a rank that much slower than the median of all ranks is a straggler"
    )
    straggler_readings: int = field(default=3, ge=1, doc="log intervals in a row before it is called one")
    tensorboard: str | None = field(default=None, doc="folder for TensorBoard's event files")
    wandb_project: str | None = field(default=None, doc="Weights & Biases project; needs `pip install wandb`")
    mlflow_uri: str | None = field(default=None, doc="MLflow tracking store; needs `pip install mlflow-skinny`")
