"""One simulated instance: its timeline, the status that follows from it, its price, and how the API shows it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trainmaster.sim.lambda_cloud.catalog import Catalog, InstanceType
from trainmaster.sim.lambda_cloud.machine import Machine

# State of the processes: `off` before the start and during a restart, `gone` for ever.
Processes = Literal["off", "starting", "ready", "stopping", "gone"]
ENDED = ("terminated", "preempted")


@dataclass(slots=True, kw_only=True)
class Instance:
    """Mutable; the lock of the cloud guards it. Times are simulated seconds, `inf` for never."""

    id: str
    name: str | None
    hostname: str
    type: InstanceType
    region: str
    hardware: str  # the physical machine behind it: GPU serials follow it
    address: str
    ssh_key_names: tuple[str, ...]
    public_keys: tuple[str, ...]
    file_system_names: tuple[str, ...]
    mounts: tuple[Mapping[str, str], ...]
    tags: tuple[Mapping[str, str], ...]
    user_data: str | None
    foreign: bool  # of somebody else in the account: the client may not touch it

    launched_at: float
    ip_at: float
    ssh_at: float
    active_at: float
    unhealthy: bool = False
    ssh_late: bool = False
    preempted_at: float | None = None
    terminate_at: float | None = None  # when the termination began
    terminated_at: float | None = None  # when it was over
    ended_by: str | None = None  # request, fault, shutdown
    planned: list[tuple[float, str]] = field(default_factory=list)  # faults to come: when, which
    injected: list[str] = field(default_factory=list)  # faults that it has, for the tests

    machine: Machine | None = None
    processes: Processes = "off"
    restarting: bool = False
    wrong: str | None = None  # why its processes could not be started

    def status(self, now_s: float) -> str:
        if self.terminated_at is not None:
            return "terminated"
        if self.terminate_at is not None:
            return "terminating"
        if self.preempted_at is not None:
            return "preempted"
        # Active means that SSH answers, but for the fault that breaks just this.
        waits = not (self.foreign or self.ssh_late or self.processes == "ready")
        if now_s < self.active_at or waits or self.restarting:
            return "booting"
        return "unhealthy" if self.unhealthy else "active"

    def wants_processes(self, now_s: float) -> bool:
        return not self.foreign and not self.is_ending and now_s >= self.ssh_at

    @property
    def is_ending(self) -> bool:
        return self.terminate_at is not None or self.preempted_at is not None

    def billed_s(self, now_s: float) -> float:
        """Seconds from the accepted launch to the end: an upper bound of what the vendor bills."""
        ends = [end for end in (self.preempted_at, self.terminated_at) if end is not None]
        return max(0.0, min([now_s, *ends]) - self.launched_at)

    def billed_minutes(self, now_s: float) -> int:
        """Whole minutes begun."""
        return math.ceil(self.billed_s(now_s) / 60)

    def cost_usd(self, now_s: float) -> float:
        return self.billed_minutes(now_s) * self.type.cents_per_hour / 6000

    def body(self, catalog: Catalog, now_s: float) -> dict[str, Any]:
        """The instance as the API shows it."""
        status = self.status(now_s)
        body: dict[str, Any] = {
            "id": self.id,
            "status": status,
            "ssh_key_names": list(self.ssh_key_names),
            "file_system_names": list(self.file_system_names),
            "region": catalog.region(self.region),
            "instance_type": self.type.body(),
            "hostname": self.hostname,
            "actions": _actions(status),
            "tags": [dict(tag) for tag in self.tags],
        }
        if self.name is not None:
            body["name"] = self.name
        if self.mounts:
            body["file_system_mounts"] = [dict(mount) for mount in self.mounts]
        if now_s >= self.ip_at:
            body |= {"ip": self.address, "private_ip": self.address}
        return body


def _actions(status: str) -> dict[str, Any]:
    """Which operations the instance allows in this status."""
    never = {"available": False, "reason_code": "vm-is-too-old", "reason_description": "Not simulated."}
    ending = {"available": False, "reason_code": "vm-is-terminating", "reason_description": "It is terminating."}
    booting = {"available": False, "reason_code": "vm-has-not-launched", "reason_description": "It is booting."}
    yes = {"available": True}
    ended = status in (*ENDED, "terminating")
    return {
        "migrate": never,
        "rebuild": never,
        "cold_reboot": never,
        "restart": ending if ended else booting if status == "booting" else yes,
        "terminate": ending if status in ("terminating", "terminated") else yes,
    }
