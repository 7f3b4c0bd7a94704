"""Measurements of one rank. Without torch: verdicts and files are made from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainmaster.bench.accept.options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """Measurements of one rank."""

    rank: int
    node: int
    host: str
    device: str
    gpu: str | None  # its uuid
    precision: str
    backend: str
    parameters: int
    repeats_s: list[float]  # of the timed steps of each repeat, by the clock of the host
    steps_s: list[float]  # of all repeats
    alone_s: list[float]  # steps without exchange
    losses: list[float]
    parameters_digest: str
    gradients_digest: str
    gradients_again: str
    memory_bytes: int | None
    compiled: bool
    graphed: bool
    waited_s: float | None = None  # for data, within the timed steps; None: synthetic
    workers: int | None = None
    sensors: dict[str, Any] | None = None  # power, clocks, temperature and utilisation of the GPU meanwhile
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def elapsed_s(self) -> float:
        return sum(self.repeats_s)


def repeat_rates(options: Options, records: Sequence[RankRecord]) -> list[float]:
    """Samples per second of each repeat: samples of all ranks, each counted once, over the time of the slowest."""
    steps = len(records[0].steps_s) / len(records[0].repeats_s)
    samples = options.samples_per_step * len(records) * steps
    return [samples / max(times) for times in zip(*(record.repeats_s for record in records), strict=True)]


def total_samples(options: Options, records: Sequence[RankRecord]) -> int:
    """Samples of all ranks and repeats, each counted once."""
    return options.samples_per_step * len(records) * len(records[0].steps_s)


def total_s(records: Sequence[RankRecord]) -> float:
    """Time of all repeats, each as long as its slowest rank took."""
    return math.fsum(max(times) for times in zip(*(record.repeats_s for record in records), strict=True))


def percentile(seconds: Sequence[float], share: float) -> float:
    """The value that this share of the measured steps does not exceed (nearest rank)."""
    ordered = sorted(seconds)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
