"""Experiment trackers: TensorBoard, Weights & Biases, MLflow. Off unless configured.

No secrets are held here: both services read their keys from the environment or their own files.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from trainmaster.core.config.watch import WatchConfig
from trainmaster.core.errors import UsageError
from trainmaster.core.plan import ATTEMPT_VARIABLE
from trainmaster.train.metrics.tfevents import TensorBoard

_TAG = "trainmaster_job"


def _run_name() -> str | None:
    """The attempt, without the number of this node."""
    return os.environ.get(ATTEMPT_VARIABLE, "").partition("/")[0] or None


class Tracker(Protocol):
    """One experiment tracker."""

    name: str

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the scalars of one step, by name."""

    def close(self) -> None:
        """Flush and close."""


def check_trackers(config: WatchConfig) -> None:
    """Raise UsageError if a configured tracker's package is missing. Called on every rank: all refuse together."""
    for field, package, command in (
        ("wandb_project", "wandb", "pip install wandb"),
        ("mlflow_uri", "mlflow", "pip install mlflow-skinny"),
    ):
        if getattr(config, field) is not None and importlib.util.find_spec(package) is None:
            raise UsageError(f"watch.{field} needs a package that is not installed here: {command}")


def open_trackers(config: WatchConfig, settings: Mapping[str, Any], alarm: Callable[[str], None]) -> list[Tracker]:
    """Open the configured trackers; `settings` is the run's config, for display.

    One that cannot be opened is logged and left out: training does not depend on it.
    """
    wanted: list[tuple[str, Callable[[], Tracker]]] = []
    if (folder := config.tensorboard) is not None:
        wanted.append(("tensorboard", lambda: TensorBoard(Path(folder))))
    if (project := config.wandb_project) is not None:
        wanted.append(("wandb", lambda: WeightsAndBiases(project, settings)))
    if (uri := config.mlflow_uri) is not None:
        wanted.append(("mlflow", lambda: MLflow(uri, settings)))
    trackers = []
    for name, begin in wanted:
        try:
            trackers.append(begin())
        except Exception as error:  # a foreign library, a network, a folder
            alarm(f"{name} could not be opened and is left out: {type(error).__name__}: {error}")
    return trackers


class WeightsAndBiases:
    """A run of wandb; WANDB_MODE=offline keeps it on this machine."""

    name = "wandb"

    def __init__(self, project: str, settings: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(project=project, name=_run_name(), config=dict(settings))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow; file:///… keeps it in a folder."""

    name = "mlflow"

    def __init__(self, uri: str, settings: Mapping[str, Any]) -> None:
        mlflow = importlib.import_module("mlflow")
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name("trainmaster")
        number = experiment.experiment_id if experiment else self._client.create_experiment("trainmaster")
        job = (_run_name() or "").rpartition(".")[0]
        # One run for all attempts of a job: the first makes it, the others find it by its tag.
        found = self._client.search_runs([number], f"tags.{_TAG} = '{job}'", max_results=1) if job else []
        self._run = found[0].info.run_id if found else ""
        if found:
            self._client.update_run(self._run, status="RUNNING")
            return
        self._run = self._client.create_run(number, run_name=_run_name(), tags={_TAG: job} if job else {}).info.run_id
        for name, value in _flat(settings):
            self._client.log_param(self._run, name, str(value)[:500])  # longer ones are refused

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._client.log_metric(self._run, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs = []
    for key, value in settings.items():
        pairs += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return pairs
