"""How a job waits: for machines (the `queue` block of a spec), and for other jobs (`after`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from trainmaster.core.errors import Fault
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


_MOST_JOBS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """Jobs that must be over before this one starts. The server holds it back, for every target alike."""

    jobs: tuple[str, ...] = field(
        default=(),
        example=["prepare-data"],
        doc="jobs of the same project, each by its name (the newest of that name) or its id; at most 100",
    )
    on: Literal["success", "always"] = field(
        default="success",
        doc="success: where one of them does not complete, this one fails with `dependency_failed` and never starts; "
        "always: it starts however they end",
    )

    def faults(self) -> Iterator[Fault]:
        if len(self.jobs) > _MOST_JOBS:
            yield Fault(path="jobs", message=f"{len(self.jobs)} jobs; at most {_MOST_JOBS} can be waited for")
        for number, word in enumerate(self.jobs):
            if not word.strip() or len(word) > 63:
                yield Fault(path=f"jobs[{number}]", message="write the name or the id of a job")
