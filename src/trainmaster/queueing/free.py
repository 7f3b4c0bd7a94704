"""Free devices by machine while a pass of the queue gives them out, and when more will be free."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainmaster.queueing.state import Assigned, Kind, Machine, Need, Running

Counts = dict[str, int]  # machine → devices


class Free:
    """Devices of one kind that a job may be given now."""

    def __init__(self, kind: Kind, machines: Iterable[Machine], running: Iterable[Running]) -> None:
        held = {device for job in running for devices in job.devices.values() for device in devices}
        self._devices = {
            machine.name: [x for x in machine.devices(kind) if x not in held and x not in machine.used]
            for machine in machines
            if not machine.closed
        }
        self.suspects = frozenset(machine.name for machine in machines if machine.suspect)
        self.counts: Counts = {name: len(devices) for name, devices in self._devices.items()}

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def take(self, names: Iterable[str], each: int) -> Assigned:
        """The devices of these machines that a job is given."""
        taken = {}
        for name in names:
            devices = self._devices[name]
            taken[name], self._devices[name] = tuple(devices[:each]), devices[each:]
            self.counts[name] -= each
        return taken


def choose(
    need: Need, counts: Mapping[str, int], prefers: Sequence[str] = (), last: Collection[str] = ()
) -> list[str] | None:
    """Machines for a job, or None where they are too few: first those that it prefers, then those with the least room
    left over, so that large jobs find whole machines. Those of `last` only where the others are too few."""
    each = need.each
    if near := [name for name in prefers if name not in last and counts.get(name, 0) >= each][: need.nodes]:
        others = {name: count for name, count in counts.items() if name not in near}
        rest = Need(nodes=need.nodes - len(near), each=each, kind=need.kind)
        more = choose(rest, others, last=last) if rest.nodes else []
        return None if more is None else [*near, *more]
    if need.nodes == 1:
        best, least = None, (True, math.inf)
        for name, count in counts.items():
            if each <= count and (rank := (name in last, count)) < least:
                best, least = name, rank
        return [best] if best is not None else None
    fitting = sorted((name in last, count, name) for name, count in counts.items() if count >= each)
    return [name for *_, name in fitting[: need.nodes]] if len(fitting) >= need.nodes else None


@dataclass(slots=True, kw_only=True)
class Reservation:
    """Devices that the first job that must wait will get, and when. Later jobs may not be in its way then."""

    job: str
    start_s: float  # math.inf: no running job says when it ends
    spare: Counts  # by machine of the reservation: devices there at that time beyond those of the job
    latest: bool = False  # `start_s` is the time limit of a job, which may end before

    def allows(self, end_s: float | None) -> bool:
        """Whether a job that starts now has left every machine by then. Nothing has where the time is not known."""
        return end_s is not None and end_s <= self.start_s < math.inf

    def limit(self, counts: Mapping[str, int]) -> Counts:
        """Devices that a job may take which will still be there at that time."""
        return {name: min(count, self.spare.get(name, count)) for name, count in counts.items()}

    def spend(self, names: Iterable[str], each: int) -> None:
        for name in names:
            if name in self.spare:
                self.spare[name] -= each


def reserve(
    job: str, need: Need, counts: Mapping[str, int], running: Iterable[Running], now_s: float
) -> Reservation | None:
    """The earliest time at which a job fits, as running jobs end; None where it does not fit even after all of them."""
    later = dict(counts)
    ends = sorted(((_end(held, now_s), held) for held in running if held.kind == need.kind), key=lambda pair: pair[0])
    for position, (end_s, held) in enumerate(ends):
        for name, devices in held.devices.items():
            if name in later:  # a closed machine gives nothing back
                later[name] += len(devices)
        if position + 1 < len(ends) and ends[position + 1][0] == end_s:
            continue
        if (names := choose(need, later)) is not None:
            spare = {name: later[name] - need.each for name in names}
            latest = any(held.end_latest and held.end_s == end_s and not held.stopping for _, held in ends)
            return Reservation(job=job, start_s=end_s, spare=spare, latest=latest)
    return None


def _end(held: Running, now_s: float) -> float:
    """When the devices of a job are expected back. One that is late is expected at any moment."""
    if held.stopping:
        return now_s
    return math.inf if held.end_s is None else max(held.end_s, now_s)
