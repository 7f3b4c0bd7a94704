"""The fastest setting that fits, and where else a run would fit. What is chosen changes no result, only how it is made:
recompute, rows at once, sharding, compile. Precision and batch stay as configured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trainmaster.core.config.train import ParallelConfig, TrainConfig
from trainmaster.estimate import Cluster, Estimate, estimate, faults_on

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A setting, what to put over the config to get it, and what it gives."""

    config: TrainConfig
    overrides: tuple[str, ...]
    estimate: Estimate


def fastest(config: TrainConfig, cluster: Cluster) -> Choice | None:
    """The fastest setting that fits these GPUs; None where none does.

    Of settings within half a percent the one with more room wins. Where the speed of the GPU is not known: the one that
    computes least again, with most rows at once.
    """
    fitting = [choice for choice in _choices(config, cluster) if choice.estimate.fits]
    if not fitting:
        return None
    if fitting[0].estimate.speed is None:
        return fitting[0]  # in the order of `_choices`
    best = max(_rate(choice) for choice in fitting)
    return min(
        (choice for choice in fitting if _rate(choice) >= 0.995 * best),
        key=lambda choice: (choice.estimate.memory.needed, len(choice.overrides)),
    )


def fewest(config: TrainConfig, clusters: Sequence[Cluster]) -> tuple[Cluster, Choice] | None:
    """The first of these clusters that it fits on, smallest first, with its fastest setting there."""
    for cluster in sorted(clusters, key=lambda cluster: cluster.gpus):
        choice = fastest(config, cluster)
        if choice is not None:
            return cluster, choice
    return None


def _choices(config: TrainConfig, cluster: Cluster) -> Iterator[Choice]:
    """Every setting worth a look: less recompute first, more rows at once first."""
    rows = config.batch_sequences // cluster.gpus
    if rows == 0 or config.batch_sequences % cluster.gpus:
        return
    sharding: list[ParallelConfig] = [config.parallel]
    if cluster.nodes > 1:
        whole = replace(config.parallel, sharding="full", shard_ranks=None)
        sharding = [whole, replace(whole, sharding="hybrid")]
    for recompute in ("none", "ops", "layers", "full"):
        for micro in (n for n in range(rows, 0, -1) if rows % n == 0):
            for base in sharding:
                compile_ = "auto" if base.compile == "off" else base.compile
                parallel = replace(base, recompute=recompute, compile=compile_)
                changed = replace(config, parallel=parallel, micro_sequences=micro)
                if any(faults_on(changed, ranks=cluster.gpus, ranks_per_node=cluster.gpus_per_node)):
                    continue
                yield Choice(
                    config=changed, overrides=_overrides(config, changed, rows), estimate=estimate(changed, cluster)
                )


def _overrides(old: TrainConfig, new: TrainConfig, rows: int) -> tuple[str, ...]:
    """Changed settings as command-line overrides, without those that only spell out a default."""
    words = []
    if (old.micro_sequences or rows) != new.micro_sequences:
        words.append(f"micro_sequences={new.micro_sequences}")
    for name in ("recompute", "compile", "sharding", "shard_ranks"):
        value = getattr(new.parallel, name)
        if value != getattr(old.parallel, name):
            words.append(f"parallel.{name}={'null' if value is None else value}")
    return tuple(words)


def _rate(choice: Choice) -> float:
    return choice.estimate.speed.tokens_per_s if choice.estimate.speed is not None else 0.0
