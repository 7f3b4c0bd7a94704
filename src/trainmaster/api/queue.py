"""The queue and the machines: who waits, why, and who has which device."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from trainmaster.core.results import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLine:
    """A job that waits."""

    job_id: str
    name: str
    project: str
    target: str
    priority: str
    nodes: int
    processes_per_node: int
    since: datetime
    position: int | None  # in our own queue of its machines; null: the target queues, or it is about to start
    reason: str  # one sentence; of a target that queues in that target's words
    before: tuple[str, ...]  # jobs before it, the next ones first, at most five; of other projects left out
    expected_at: datetime | None  # expected start; null: not known
    submitted_by: str | None = None  # name of the token; null: the command line on the home folder
    price_cents_per_hour: float | None = None  # for all its machines; null: unknown
    expected_latest: bool = False  # it starts then at the latest: a job before it may end before its time limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectShare:
    """What a project may have of the machines that our own queue gives out."""

    project: str
    weight: float
    quota: int | None  # devices at once; null: no limit
    held: int = 0  # devices that its jobs hold now


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePage:
    """Jobs that wait, in the order of the queue."""

    jobs: tuple[QueueLine, ...]
    total: int
    limit: int
    offset: int
    shares: tuple[ProjectShare, ...]
    made_at: datetime
    others: int = 0  # jobs of other projects that wait, where the jobs of one project are listed


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLine:
    """A GPU, a MIG slice or a slot, and who has it."""

    device: str
    kind: str  # gpu, slot
    model: str
    job_id: str | None
    job: str | None  # its name
    project: str | None
    since: datetime | None
    used: str | None  # who uses it besides jobs, or why it cannot be used
    submitted_by: str | None = None  # of the job; null: none, or the command line on the home folder
    price_cents_per_hour: float | None = None  # of the job, for all its machines; null: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineUse:
    """An open job on a machine of which our queue gives out no device."""

    job_id: str
    job: str  # its name
    project: str
    since: datetime
    submitted_by: str | None = None  # name of the token; null: the command line on the home folder
    price_cents_per_hour: float | None = None  # of the job, for all its machines; null: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLine:
    """A machine of a target."""

    target: str  # empty: known only from a check by the operator
    machine: str
    devices: tuple[DeviceLine, ...]
    verdict: Verdict | None  # by the newest measurement of each check; null: never checked
    checked_at: datetime | None
    seen_at: datetime | None
    closed: str | None = None  # why it takes no new jobs; null: it does
    drained_at: datetime | None = None
    drained_by: str | None = None
    used_by: tuple[MachineUse, ...] = ()  # without a device of our queue


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinesPage:
    """Machines of every target that was used."""

    machines: tuple[MachineLine, ...]
    made_at: datetime
