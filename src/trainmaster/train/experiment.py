"""Settings that make two runs two experiments, saved with every checkpoint.

A run that finds a checkpoint of other settings would report that run's losses as its own. How a run is sharded, how
often it is saved and how long it is may change; these may not, unless the user asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainmaster.core.config.train import OptimizerConfig, TrainConfig
from trainmaster.core.errors import CheckpointError
from trainmaster.core.schema import to_plain

# Follows the number of steps, which may grow; and it is over when most checkpoints are made.
_MAY_CHANGE = ("optimizer.warmup_steps",)
_LATER = ("init_from", "precision", "master")  # recorded by later versions than the others
NOT_STATED = "not stated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Settings of a run that a resumed one must share."""

    seed: int
    batch_sequences: int
    sequence_tokens: int
    optimizer: OptimizerConfig
    # As written in the config. None: saved by a version that did not record it.
    init_from: str | None = None
    precision: str | None = None
    master: str | None = None


def experiment_of(config: TrainConfig) -> Experiment:
    """The experiment that a config describes."""
    return Experiment(
        seed=config.seed,
        batch_sequences=config.batch_sequences,
        sequence_tokens=config.sequence_tokens,
        optimizer=config.optimizer,
        init_from=config.init_from if config.init_from is not None else NOT_STATED,
        precision=config.precision,
        master=config.master,
    )


def must_continue(path: str, saved: Experiment | None, wanted: Experiment, *, changes_allowed: bool) -> None:
    """CheckpointError if the checkpoint is of another experiment; None: of a version that did not save it.

    The length of a sequence may never change: the cursor counts sequences, so tokens would be skipped or repeated.
    """
    if saved is None:
        return
    changes = {
        name: f"{name} was {before}, is now {after}"
        for name, before, after in differences(to_plain(saved), to_plain(wanted))
        if name not in _MAY_CHANGE and not (name in _LATER and before is None)
    }
    if "sequence_tokens" in changes:
        raise CheckpointError(
            f"{path}: {changes['sequence_tokens']}; samples are counted in sequences, so the run would skip or repeat "
            "tokens: set it back, or start a new run with init_from"
        )
    if changes and not changes_allowed:
        raise CheckpointError(
            f"{path} was saved by another experiment: {'; '.join(changes.values())}; choose another checkpoint.folder, "
            "or continue that run with these settings: checkpoint.resume=changed"
        )


def differences(
    saved: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, object, object]]:
    """Fields of `wanted` that `saved` has not or has with another value: name, saved value, wanted value."""
    for name, after in wanted.items():
        before = saved.get(name)
        if isinstance(after, Mapping) and isinstance(before, Mapping):
            yield from differences(before, after, f"{prefix}{name}.")
        elif before != after:
            yield f"{prefix}{name}", before, after
