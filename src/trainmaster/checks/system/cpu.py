"""This process may use as many CPUs as it should, by its affinity, by what is online, and by its container's quota."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainmaster.checks.comparison import part
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok, warn
from trainmaster.node import cgroup
from trainmaster.node.host import Host

LEVEL = 1
GPU = False
EXPECTS = ("cpus",)
COMPARES = (part("schedulable", "CPU count", "check for offline CPUs, and hyper-threading in the BIOS"),)
METRICS = {"system.cpu.count": "usable"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpus:
    """What the scheduler allows and what the container's quota allows."""

    schedulable: int
    quota: float | None

    @property
    def usable(self) -> float:
        return self.schedulable if self.quota is None else min(self.schedulable, self.quota)


def read(host: Host) -> Cpus:
    return Cpus(schedulable=host.cpus(), quota=cgroup.read_cpu_quota(host))


def judge(cpus: Cpus, expect: Expect) -> Finding:
    summary = f"{cpus.usable:g} CPUs usable"
    if cpus.quota is not None and cpus.quota < cpus.schedulable:
        summary += f" (a quota on {cpus.schedulable})"
    values: dict[str, Any] = {"usable": cpus.usable, "schedulable": cpus.schedulable, "quota": cpus.quota}
    if cpus.schedulable < 1:
        return fail("no CPU that this process may use is online", action="widen its CPU affinity", **values)
    if expect.cpus is not None and cpus.usable < expect.cpus:
        action = "ask for more CPUs, or widen the container's quota or the process's affinity"
        return fail(f"{summary}, not {expect.cpus}", action=action, **values)
    if expect.cpus is None and cpus.usable < 1:
        # Python, the data loader and a collective's progress thread then wait for each other's time slices.
        return warn(f"{summary}: less than one", action="give the container at least one CPU", **values)
    return ok(summary, **values)
