"""What the queue decides from, and what it decides. Times are seconds since 1970."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["gpu", "slot"]  # a slot is room for one rank that uses no GPU
Why = Literal["never", "quota", "used", "first", "behind"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Constants of the queue."""

    # A job that has waited so long counts one priority higher, again and again. 6 h: a low job is ahead of urgent ones
    # that come a day later, and one working day does not turn the priorities over.
    age_s: float = 6 * 3600.0
    # A job that began later is not preempted: checks, the start of ranks and the first steps would be paid for nothing.
    min_run_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device as its target lists it."""

    id: str
    machine: str
    model: str = ""
    used: str | None = None  # who uses it, or why it cannot be used
    attempts: tuple[str, ...] = ()  # whose processes use it; "": none of ours
    parent: str = ""  # the GPU of a MIG slice


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceListing:
    """What the machines of a target have now."""

    devices: Mapping[Kind, Sequence[Device]]  # a kind that nobody stated is absent, and stays as it was
    silent: Mapping[str, str] = field(default_factory=dict)  # machine → why it did not say
    answered: Sequence[str] = ()  # machines that said what they have, be it nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine and its devices."""

    name: str
    gpus: tuple[str, ...] = ()
    slots: tuple[str, ...] = ()
    used: Mapping[str, str] = field(default_factory=dict)  # device → who uses it besides us, and must be waited for
    closed: str = ""  # why it takes no jobs now
    suspect: bool = False  # its newest pre-flight failed: jobs get it last
    unknown: bool = False  # it never said which GPUs it has: there may be some

    def devices(self, kind: Kind) -> tuple[str, ...]:
        return self.gpus if kind == "gpu" else self.slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Devices that a job needs: so many on each of so many machines, all at once."""

    nodes: int
    each: int
    kind: Kind

    @property
    def devices(self) -> int:
        return self.nodes * self.each


Assigned = Mapping[str, tuple[str, ...]]  # machine → devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A job that holds devices."""

    job: str
    project: str
    priority: int  # as submitted; 0 is the lowest
    kind: Kind
    devices: Assigned
    since_s: float
    end_s: float | None = None  # expected; None: not known
    end_latest: bool = False  # `end_s` is its time limit: it may end before
    preemptible: bool = False
    loss: float | None = None  # steps since its last durable save × devices; None: it cannot say
    stopping: bool = False  # it was asked to stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A job in the queue."""

    job: str
    project: str
    priority: int
    need: Need
    since_s: float
    longest_s: float | None = None  # it ends after so long at the latest; None: no limit
    prefers: tuple[str, ...] = ()  # machines that it ran on before: its checkpoints may be there


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a project may have."""

    weight: float = 1.0
    quota: int | None = None  # devices at once; None: no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Machines that one queue serves, with everything that runs and waits there."""

    now_s: float
    machines: tuple[Machine, ...]
    running: tuple[Running, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    shares: Mapping[str, Share] = field(default_factory=dict)
    rules: Rules = field(default_factory=Rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A job to start, with its devices."""

    job: str
    devices: Assigned


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempt:
    """A job to stop so that another can start."""

    job: str
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A job that stays in the queue: its place, and why."""

    job: str
    position: int  # from 1
    why: Why
    text: str  # one sentence for people
    start_s: float | None = None  # expected start, where it is known
    latest: bool = False  # at the latest: that start waits for the time limit of a job, which may end before


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What to do now."""

    starts: tuple[Start, ...]
    preempts: tuple[Preempt, ...]
    waits: tuple[Wait, ...]  # in the order of the queue
