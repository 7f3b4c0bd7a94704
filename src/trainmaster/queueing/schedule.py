"""Which jobs start now, which are stopped for them, and why the others wait: one pure function over the state.

In the order of the queue (order.py) every job that fits is started, all its nodes or none. The first that does not fit
gets a reservation: the earliest time at which it fits as running jobs end. Jobs behind it are started (back-filled)
where they end before that time or take devices that it will not need. A job over its project's quota waits, and so do
later jobs of its project; it reserves nothing. A job that needs a device in use by a program that is not ours
reserves nothing either: nobody knows when such a program ends.

Where the first job that must wait has a higher priority than preemptible jobs that run, those are stopped that lose
least, no more than it needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from trainmaster.queueing.free import Free, Reservation, choose, reserve
from trainmaster.queueing.order import Order, Usage
from trainmaster.queueing.state import (
    Decisions,
    Kind,
    Machine,
    Need,
    Preempt,
    Running,
    Start,
    State,
    Wait,
    Waiting,
    Why,
)

KINDS: tuple[Kind, ...] = get_args(Kind)


def schedule(state: State) -> Decisions:
    """The decisions of one pass."""
    # Each kind goes by itself: a job uses one, and none is given for another.
    tables = {kind: _Table(kind, state) for kind in KINDS}
    usage = Usage(state)
    order = Order(state, usage)
    starts: list[Start] = []
    waits: list[Wait] = []
    held_back: set[tuple[str, Kind]] = set()  # projects whose next job is over its quota
    while (job := order.next()) is not None:
        table = tables[job.need.kind]
        why, text = _refuse(job, state, table, usage, held_back)
        start_s, latest = None, False
        if why is None:
            started = table.try_start(job)
            if started is not None:
                starts.append(started)
                usage.add(job.project, job.need.kind, job.need.devices)
                continue
            why, text = table.explain(job)
            if why == "first":
                start_s, latest = table.find_start()
        elif why == "quota" and (job.project, job.need.kind) not in held_back:
            held_back.add((job.project, job.need.kind))
            start_s, latest, missing = table.find_quota_start(job, state.shares[job.project].quota or 0)
            text += missing
        waits.append(Wait(job=job.job, position=len(waits) + 1, why=why, text=text, start_s=start_s, latest=latest))
    preempts = [preempt for table in tables.values() for preempt in table.preempt()]
    return Decisions(starts=tuple(starts), preempts=tuple(preempts), waits=tuple(waits))


def find_misfit(need: Need, machines: Sequence[Machine]) -> str | None:
    """Why a job can never start on these machines; None where it fits if they are empty."""
    sizes = [len(machine.devices(need.kind)) for machine in machines]
    unknown = sum(machine.unknown and need.kind == "gpu" for machine in machines)
    enough = sum(size >= need.each for size in sizes) + unknown
    if enough >= need.nodes:
        return None
    unit = _count(need.each, need.kind)
    if need.nodes == 1:
        return f"it needs {unit} on one machine, and the largest has {max(sizes, default=0)}"
    return f"it needs {unit} on each of {need.nodes} machines, and {enough} of {len(sizes)} have so many"


def _refuse(
    job: Waiting, state: State, table: _Table, usage: Usage, held_back: set[tuple[str, Kind]]
) -> tuple[Why | None, str]:
    """Why a job may not start whatever is free."""
    misfit = table.find_misfit(job.need)
    if misfit is not None:
        return "never", f"{misfit}: it can never start"
    share = state.shares.get(job.project)
    if share is None or share.quota is None:
        return None, ""
    unit = _count(share.quota, job.need.kind)
    if job.need.devices > share.quota:
        return "never", f"it needs {job.need.devices}, and the quota of project {job.project} is {unit}"
    if (job.project, job.need.kind) in held_back:
        return "quota", f"project {job.project} may hold {unit} at once, and an earlier job of it waits for them"
    used = usage.of(job.project, job.need.kind)
    if used + job.need.devices > share.quota:
        return (
            "quota",
            f"project {job.project} has {used} of its quota of {unit}, and this job needs {job.need.devices}",
        )
    return None, ""


@dataclass(slots=True)
class _Table:
    """Devices of one kind during a pass."""

    kind: Kind
    state: State
    free: Free = field(init=False)
    running: list[Running] = field(init=False)
    reserved: Reservation | None = None
    head: Waiting | None = None  # the first that must wait, and for which devices are reserved
    _unfit: dict[tuple[int, int, bool], bool] = field(default_factory=dict)  # shapes that did not fit in this pass
    _misfits: dict[Need, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.running = [job for job in self.state.running if job.kind == self.kind]
        self.free = Free(self.kind, self.state.machines, self.running)

    def find_misfit(self, need: Need) -> str | None:
        if need not in self._misfits:
            self._misfits[need] = find_misfit(need, self.state.machines)
        return self._misfits[need]

    def try_start(self, job: Waiting) -> Start | None:
        need, reserved, now_s = job.need, self.reserved, self.state.now_s
        end_s = None if job.longest_s is None else now_s + job.longest_s
        passes = reserved is None or reserved.allows(end_s)
        shape = (need.nodes, need.each, passes)
        if shape in self._unfit:  # devices only get fewer during a pass
            return None
        counts = self.free.counts if reserved is None or passes else reserved.limit(self.free.counts)
        names = choose(need, counts, job.prefers, self.free.suspects)
        if names is None:
            self._unfit[shape] = True
            if reserved is None:
                self._reserve(job)
            return None
        if reserved is not None and not passes:
            reserved.spend(names, need.each)
        devices = self.free.take(names, need.each)
        self.running.append(
            Running(
                job=job.job, project=job.project, priority=job.priority, kind=self.kind, devices=devices,
                since_s=now_s, end_s=end_s, end_latest=end_s is not None,
            )
        )  # fmt: skip
        return Start(job=job.job, devices=devices)

    def _reserve(self, job: Waiting) -> None:
        self.reserved = reserve(job.job, job.need, self.free.counts, self.running, self.state.now_s)
        if self.reserved is not None:
            self.head = job
            self._unfit.clear()  # from here on a shape that ends in time and one that does not differ

    def find_start(self) -> tuple[float | None, bool]:
        """The expected start of the first that must wait, where it is known, and whether it is one at the latest."""
        if self.reserved is None or self.reserved.start_s == math.inf:
            return None, False
        return self.reserved.start_s, self.reserved.latest

    def find_quota_start(self, job: Waiting, quota: int) -> tuple[float | None, bool, str]:
        """When the first of its project that waits for the quota fits into it, as jobs of its project end; whether that
        is at the latest; and what is missing where it is not known.

        Nothing is reserved for it: it is known only where the devices are free now, or are those of its project.
        """
        held = [running for running in self.running if running.project == job.project]
        used = sum(len(devices) for running in held for devices in running.devices.values())
        counts, now_s = dict(self.free.counts), self.state.now_s
        for end_s, running in sorted(((_end(each, now_s), each) for each in held), key=lambda pair: pair[0]):
            if end_s == math.inf:
                return None, False, self._describe_unlimited(held)
            used -= sum(len(devices) for devices in running.devices.values())
            _give(counts, running)
            if used + job.need.devices <= quota:
                fits = self.head is None and choose(job.need, counts) is not None
                return (end_s, running.end_latest and not running.stopping, "") if fits else (None, False, "")
        return None, False, ""

    @staticmethod
    def _describe_unlimited(running: Sequence[Running]) -> str:
        count = sum(job.end_s is None and not job.stopping for job in running)
        if not count:
            return ""
        jobs = "1 running job has" if count == 1 else f"{count} running jobs have"
        return f"; its start is not known: {jobs} no limits.timeout_s"

    def explain(self, job: Waiting) -> tuple[Why, str]:
        need = job.need
        wants = f"it needs {_count(need.each, self.kind)}"
        wants += f" on each of {need.nodes} machines" if need.nodes > 1 else ""
        has = f"{self.free.total} free" if self.free.total else "none is free"
        if self.head is None:
            return "used", f"{wants}; {self._describe_used()}"
        reserved = self.reserved
        assert reserved is not None
        if self.head.job == job.job:
            missing = self._describe_unlimited(self.running) if reserved.start_s == math.inf else ""
            rest = f"{missing}{self._describe_bad()}"
            return "first", f"{wants}, {has}{self._describe_closed()}; what becomes free is kept for it{rest}"
        return "behind", f"{wants}, {self._describe_free(reserved)}"

    def _describe_free(self, reserved: Reservation) -> str:
        total = self.free.total
        if not total:
            return "and none is free"
        beyond = max(sum(reserved.limit(self.free.counts).values()), 0)
        if beyond == total:
            return f"{total} free"
        return f"{beyond or 'none is'} free besides the {total - beyond} kept for the first in the queue"

    def _describe_closed(self) -> str:
        """Devices on machines that take no jobs: they look free where machines are listed."""
        closed = [machine for machine in self.state.machines if machine.closed and machine.devices(self.kind)]
        count = sum(len(machine.devices(self.kind)) for machine in closed)
        if not count:
            return ""
        return f"; {_count(count, self.kind)} on machines that take no jobs ({closed[0].name}: {closed[0].closed})"

    def _describe_bad(self) -> str:
        """That no other machine is left: the job would be given one whose check failed."""
        open_ones = [machine for machine in self.state.machines if not machine.closed and machine.devices(self.kind)]
        if not open_ones or not all(machine.suspect for machine in open_ones):
            return ""
        return f"; the newest check of {open_ones[0].name} failed, and no machine without a failed check is left"

    def _describe_used(self) -> str:
        used = [who for machine in self.state.machines if not machine.closed for who in machine.used.values()]
        closed = [f"{machine.name}: {machine.closed}" for machine in self.state.machines if machine.closed]
        parts = [f"{len(used)} not to be had now ({used[0]})"] if used else []
        parts += [f"machines closed ({closed[0]})"] if closed else []
        return " and ".join(parts) or "devices are missing"

    def preempt(self) -> list[Preempt]:
        """Jobs to stop for the first that must wait: in the order of what they lose, none that is not needed."""
        job = self.head
        if job is None:
            return []
        counts = dict(self.free.counts)
        for held in self.running:
            if held.stopping:
                _give(counts, held)
        if choose(job.need, counts) is not None:
            return []  # what is stopping already is enough
        victims: list[Running] = []
        for held in sorted(filter(self._may_stop, self.running), key=_loss):
            victims.append(held)
            _give(counts, held)
            if choose(job.need, counts) is not None:
                break
        else:
            return []
        for held in list(reversed(victims)):
            _give(counts, held, sign=-1)
            if choose(job.need, counts) is None:
                _give(counts, held)
            else:
                victims.remove(held)
        return [Preempt(job=held.job, by=job.job) for held in victims]

    def _may_stop(self, held: Running) -> bool:
        assert self.head is not None
        old = self.state.now_s - held.since_s >= self.state.rules.min_run_s
        return held.preemptible and not held.stopping and old and held.priority < self.head.priority


def _end(held: Running, now_s: float) -> float:
    """When a job ends; one that was asked to stop ends now, infinity is not known."""
    if held.stopping:
        return now_s
    return math.inf if held.end_s is None else max(held.end_s, now_s)


def _loss(held: Running) -> tuple[bool, float, int, float, str]:
    """Least loss first; of two alike the lower priority, then the one that ran for less."""
    return held.loss is None, held.loss or 0.0, held.priority, -held.since_s, held.job


def _give(counts: dict[str, int], held: Running, *, sign: int = 1) -> None:
    for name, devices in held.devices.items():
        if name in counts:
            counts[name] += sign * len(devices)


def _count(number: int, kind: Kind) -> str:
    unit = "GPU" if kind == "gpu" else "slot"
    return f"{number} {unit}" if number == 1 else f"{number} {unit}s"
