"""What one rank of an acceptance run measured. Without torch: verdicts and files are made from it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank measured."""

    rank: int
    node: int
    host: str
    device: str
    gpu: str | None  # its uuid
    precision: str
    backend: str
    parameters: int
    elapsed_s: float  # of the active iterations, by the clock of the host
    steps_s: list[float]
    alone_s: list[float]  # steps without exchange
    losses: list[float]
    parameters_digest: str
    gradients_digest: str
    gradients_again: str
    memory_bytes: int | None
    compiled: bool
    graphed: bool
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
