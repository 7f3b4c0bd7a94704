"""State of the simulated account: its instances, what may be launched, and what happens to them.

Every public call holds the lock. Processes are started and ended by fleet.py; here are only the facts.
"""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from trainmaster.core.errors import UsageError
from trainmaster.core.vendors.lambda_api import SSH_KEYS_PER_LAUNCH, USER_DATA_MAX_BYTES
from trainmaster.sim.lambda_cloud.account import FileSystems, SshKeys, default_mount
from trainmaster.sim.lambda_cloud.catalog import Catalog, InstanceType
from trainmaster.sim.lambda_cloud.clock import Clock
from trainmaster.sim.lambda_cloud.errors import ApiError, invalid, missing, no_capacity
from trainmaster.sim.lambda_cloud.faults import FAULTS, Faults
from trainmaster.sim.lambda_cloud.instance import Instance
from trainmaster.sim.lambda_cloud.settings import Settings

_PER_NET = 250


class Cloud:
    """All instances ever launched, by id, in the order of their launches."""

    def __init__(self, settings: Settings, *, clock: Clock, catalog: Catalog, faults: Faults) -> None:
        self.lock = threading.RLock()
        self.settings, self.clock, self.catalog, self.faults = settings, clock, catalog, faults
        self.instances: dict[str, Instance] = {}
        self.ssh_keys = SshKeys()
        self.file_systems = FileSystems(settings.folder / "filesystems", catalog)
        self.foreign_touched: list[str] = []  # operations of the client on instances that are not its own
        self._addresses = 0
        self._free_addresses: list[str] = []
        self._hardware: dict[tuple[str, str], int] = {}
        self._bad_hardware: dict[str, bool] = {}

    def launch(self, request: Mapping[str, Any]) -> Instance:
        """A new instance, or a refusal. The request fits the schema already."""
        with self.lock:
            kind = self._check(request)
            region = str(request["region_name"])
            mounts = self._mounts(request, region)
            keys = {name: self.ssh_keys.public_key(name) for name in request["ssh_key_names"]}
            if len(self._live()) >= (self.settings.quota or math.inf):
                raise ApiError(400, "global/quota-exceeded", "Quota exceeded.", "Terminate an instance.")
            if not self.has_capacity(kind, region) or self.faults.happens("capacity-flicker"):
                raise no_capacity(kind.name, region)
            instance = self._new(kind, region, request, keys=keys, mounts=mounts)
            self._inject_at_launch(instance)
            self.instances[instance.id] = instance
            return instance

    def has_capacity(self, kind: InstanceType, region: str) -> bool:
        # Machines of others stay for ever here: with few places they would take them all in the end.
        used = sum(
            instance.type is kind and instance.region == region and not instance.foreign for instance in self._live()
        )
        return region in kind.regions and used < self.settings.capacity

    def listed(self) -> list[Instance]:
        """Instances that the listing shows: all that live, and those that ended a short time ago."""
        with self.lock:
            now = self.clock.now_s()
            return [
                instance
                for instance in self.instances.values()
                if now < _last_listed(instance) + self.settings.listed_s
            ]

    def find(self, instance_id: str) -> Instance:
        with self.lock:
            instance = self.instances.get(instance_id)
            if instance is None or instance not in self.listed():
                raise missing("Specified instance")
            return instance

    def terminate(self, ids: Sequence[str]) -> list[Instance]:
        """Begin to terminate all of these, or none where one does not exist."""
        with self.lock:
            instances = self._named(ids, "terminate")
            for instance in instances:
                self.end(instance, by="request")
            return instances

    def restart(self, ids: Sequence[str]) -> list[Instance]:
        with self.lock:
            instances, now = self._named(ids, "restart"), self.clock.now_s()
            for instance in instances:
                if instance.status(now) not in ("active", "unhealthy"):
                    raise ApiError(409, "global/conflict", f"Instance {instance.id} is {instance.status(now)}.")
            for instance in instances:
                instance.restarting = True
                instance.ssh_at, instance.active_at = now + self.settings.boot_s / 2, now + self.settings.boot_s
            return instances

    def end(self, instance: Instance, *, by: str) -> None:
        """Begin to terminate an instance; nothing where that has begun."""
        with self.lock:
            if instance.terminate_at is None:
                instance.terminate_at = self.clock.now_s()
                instance.ended_by = instance.ended_by or by

    def preempt(self, instance: Instance) -> None:
        with self.lock:
            if not instance.is_ending:
                instance.preempted_at, instance.ended_by = self.clock.now_s(), "fault"

    def is_mounted(self, name: str) -> bool:
        with self.lock:
            return any(name in instance.file_system_names for instance in self._live())

    def add_foreign(self, name: str, *, kind: InstanceType | None = None, region: str | None = None) -> Instance:
        """An instance of somebody else in the account: listed and active, without processes."""
        with self.lock:
            kind = kind or next(iter(self.catalog.types.values()))
            request = {"name": name}
            instance = self._new(
                kind, region or kind.regions[0], request, keys={"somebody-else": ""}, mounts=(), foreign=True
            )
            self.instances[instance.id] = instance
            return instance

    def release_address(self, address: str) -> None:
        with self.lock:
            self._free_addresses.append(address)

    def is_broken(self, hardware: str) -> bool:
        with self.lock:
            return self._bad_hardware.get(hardware, False)

    def break_hardware(self, hardware: str) -> None:
        with self.lock:
            self._bad_hardware[hardware] = True

    def _check(self, request: Mapping[str, Any]) -> InstanceType:
        """Refuse what the schema does not state in its fields."""
        kind = self.catalog.types.get(request["instance_type_name"])
        if kind is None:
            raise missing(f"Instance type {request['instance_type_name']}")
        if request["region_name"] not in self.catalog.regions:
            raise missing(f"Region {request['region_name']}")
        if len(request["ssh_key_names"]) != SSH_KEYS_PER_LAUNCH:
            raise invalid("ssh_key_names: exactly one SSH key must be specified.")
        if request.get("quantity", 1) != 1:
            raise invalid("quantity: only 1 is allowed.")
        if len(request.get("user_data", "").encode()) > USER_DATA_MAX_BYTES:
            raise invalid("user_data: longer than 1 MB.")
        image = request.get("image")
        if image and not any(
            image.items() <= {"id": known["id"], "family": known["family"]}.items() for known in self.catalog.images
        ):
            raise missing("Image")
        return kind

    def _mounts(self, request: Mapping[str, Any], region: str) -> tuple[Mapping[str, str], ...]:
        """Mounts by file system: a mount path of its own goes before the default one."""
        mounts: dict[str, Mapping[str, str]] = {}
        for name in request.get("file_system_names", ()):
            row = self.file_systems.find(region=region, name=name)
            mounts[row["id"]] = {"mount_point": default_mount(row["name"]), "file_system_id": row["id"]}
        for mount in request.get("file_system_mounts", ()):
            row = self.file_systems.find(region=region, file_system_id=mount["file_system_id"])
            mounts[row["id"]] = {"mount_point": mount["mount_point"], "file_system_id": row["id"]}
        return tuple(mounts.values())

    def _new(
        self, kind: InstanceType, region: str, request: Mapping[str, Any], *, keys: Mapping[str, str],
        mounts: tuple[Mapping[str, str], ...], foreign: bool = False,
    ) -> Instance:  # fmt: skip
        now, boot_s = self.clock.now_s(), 0.0 if foreign else self.settings.boot_s
        address = self._address()
        names = tuple(self.file_systems.find(region=region, file_system_id=m["file_system_id"])["name"] for m in mounts)
        return Instance(
            id=uuid.uuid4().hex,
            name=request.get("name"),
            hostname=request.get("hostname") or address.replace(".", "-"),
            type=kind,
            region=region,
            hardware=self._next_hardware(kind, region),
            address=address,
            ssh_key_names=tuple(keys),
            public_keys=tuple(keys.values()),
            file_system_names=names,
            mounts=mounts,
            tags=tuple(request.get("tags", ())),
            user_data=request.get("user_data"),
            foreign=foreign,
            launched_at=now,
            ip_at=now + 0.3 * boot_s,
            ssh_at=now + 0.5 * boot_s,
            active_at=now + boot_s,
        )

    def _inject_at_launch(self, instance: Instance) -> None:
        """Draw every fault of a launch and of the life after it."""
        happens, delay_s = self.faults.happens, self.faults.delay_s
        drawn = {name for name, fault in FAULTS.items() if fault.kind == "instance" and happens(name)}
        instance.planned += sorted((instance.active_at + delay_s(name), name) for name in sorted(drawn))
        for name in ("late-ip", "ssh-late", "stuck-booting", "unhealthy", "duplicate-name"):
            if happens(name):
                instance.injected.append(name)
        if "late-ip" in instance.injected:
            instance.ip_at = instance.active_at + delay_s("late-ip")
        if "ssh-late" in instance.injected:
            instance.ssh_at, instance.ssh_late = instance.active_at + delay_s("ssh-late"), True
        if "stuck-booting" in instance.injected:
            instance.active_at = math.inf
        instance.unhealthy = "unhealthy" in instance.injected
        if "duplicate-name" in instance.injected and instance.name is not None:
            self.add_foreign(instance.name, kind=instance.type, region=instance.region)
        if instance.type.gpus and instance.hardware not in self._bad_hardware:
            self._bad_hardware[instance.hardware] = happens("cuda-broken")
        if self.is_broken(instance.hardware):
            instance.injected.append("cuda-broken")

    def _address(self) -> str:
        if self._free_addresses and self.faults.happens("ip-reuse"):
            return self._free_addresses.pop()
        number, self._addresses = self._addresses, self._addresses + 1
        return f"127.77.{number // _PER_NET % 256}.{number % _PER_NET + 2}"

    def _next_hardware(self, kind: InstanceType, region: str) -> str:
        """The next free machine of the type in the region, in turns: returned hardware comes back after the others."""
        used = {instance.hardware for instance in self._live()}
        first = self._hardware.get((kind.name, region), 0)
        numbers = [(first + step) % self.settings.capacity for step in range(self.settings.capacity)]
        number = next((free for free in numbers if f"{region}/{kind.name}/{free}" not in used), first)
        self._hardware[kind.name, region] = number + 1
        return f"{region}/{kind.name}/{number}"

    def _live(self) -> list[Instance]:
        return [
            instance
            for instance in self.instances.values()
            if instance.terminated_at is None and instance.preempted_at is None
        ]

    def _named(self, ids: Sequence[str], operation: str) -> list[Instance]:
        if not ids:
            raise invalid("instance_ids: empty.")
        instances = [self.find(name) for name in dict.fromkeys(ids)]
        self.foreign_touched += [f"{operation} {instance.id}" for instance in instances if instance.foreign]
        return instances


def _last_listed(instance: Instance) -> float:
    """Since when an instance has ended; `inf` while it has not."""
    if instance.terminated_at is not None:
        return instance.terminated_at
    return instance.preempted_at if instance.preempted_at is not None and instance.terminate_at is None else math.inf


def find_known(cloud: Cloud, instance_id: str) -> Instance:
    """An instance for a test or the admin path, ended ones too."""
    instance = cloud.instances.get(instance_id)
    if instance is None:
        raise UsageError(f"no instance {instance_id}")
    return instance
