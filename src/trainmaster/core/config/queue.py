"""How a job waits for machines: the `queue` block of a spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from trainmaster.core.schema import YEAR_S, field

PRIORITIES = ("low", "normal", "high", "urgent")  # of our own queue, lowest first
_NAME = r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?|[A-Za-z0-9_-]{1,63}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """How the job waits for machines. Slurm and Kueue do the queueing where they are; elsewhere the server does."""

    HINTS: ClassVar[Mapping[str, str]] = {"max_wait": "write max_wait_s: seconds"}

    name: str | None = field(
        default=None,
        pattern=_NAME,
        example="team-a",
        doc="queue of the engine: a Kueue LocalQueue, a Slurm QOS; not stated: the engine's default",
    )
    priority: str = field(
        default="normal",
        pattern=_NAME,
        example="high",
        doc="low, normal, high or urgent; on Kubernetes also the name of a WorkloadPriorityClass",
    )
    preemptible: bool = field(
        default=False, doc="may be stopped for a job of higher priority: it saves, waits again and goes on"
    )
    max_wait_s: float | None = field(
        default=None, gt=0, most=YEAR_S, doc="longest time in the queue, then the job fails; not stated: no limit"
    )
