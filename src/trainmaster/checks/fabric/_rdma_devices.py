"""RDMA devices of a machine (InfiniBand, RoCE, EFA), from /sys/class/infiniband.

These files need no tool and no privilege, and containers have them too. The kind of a device follows from its driver
(EFA) and from the link layer of its ports.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from trainmaster.checks import system_files
from trainmaster.checks.fabric import _trouble
from trainmaster.core.errors import HostError
from trainmaster.core.results import Finding
from trainmaster.node.host import Host
from trainmaster.node.parse import ibstat

FOLDER = system_files.RDMA
# drivers/infiniband/core/sysfs.c: state_show and phys_state_to_str
STATES = ("NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER")
LAYERS = ("InfiniBand", "Ethernet", "Unspecified")
PHYSICAL = ("Sleep", "Polling", "Disabled", "PortConfigurationTraining", "LinkUp", "LinkErrorRecovery", "Phy Test")


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """Port of a device. None: its file is unreadable."""

    device: str
    number: int
    state: str | None  # ACTIVE, DOWN, INIT, ARMED
    physical_state: str | None  # LinkUp, Polling, Disabled
    rate_gbps: float | None
    link_layer: str
    lanes: int | None = None
    trouble: _trouble.Trouble | None = None  # the first file that could not be read

    @property
    def up(self) -> bool:
        return self.state == "ACTIVE" and self.physical_state == "LinkUp"

    @property
    def readable(self) -> bool:
        """Whether state and link layer are words that the kernel uses."""
        return self.state in STATES and self.physical_state in PHYSICAL and self.link_layer in LAYERS

    @property
    def name(self) -> str:
        return f"{self.device}:{self.number}"

    @property
    def folder(self) -> str:
        return f"{FOLDER}/{self.device}/ports/{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """RDMA device."""

    name: str  # mlx5_0, rdmap79s0
    driver: str | None  # efa, mlx5_core; None where it does not sit on a bus (soft RoCE), or is not readable
    board: str  # its model: devices of one model are alike
    ports: tuple[Port, ...]
    address: str | None  # on the PCI bus; None: not shown
    interfaces: tuple[str, ...]  # its network interfaces in this network namespace
    troubles: tuple[_trouble.Trouble, ...] = ()  # its files that could not be read; those of its ports are there

    @property
    def efa(self) -> bool:
        return self.driver == "efa"

    @property
    def every_trouble(self) -> tuple[_trouble.Trouble, ...]:
        """Its files and those of its ports that could not be read."""
        return (*self.troubles, *(port.trouble for port in self.ports if port.trouble is not None))

    @property
    def unknown(self) -> bool:
        """Whether its driver could not be read."""
        return any(trouble.path.endswith("/device/uevent") for trouble in self.troubles)

    @property
    def scalable(self) -> bool:
        """Whether it is a scalable function: a part of a card for a container, on the auxiliary bus."""
        return self.driver == "mlx5_core.sf"


def read(host: Host) -> tuple[Device, ...]:
    """Every RDMA device; empty if the kernel has no such class. What cannot be read is noted at its own device."""
    return tuple(_device(host, name) for name in system_files.list_rdma(host))


def ports(devices: tuple[Device, ...]) -> list[Port]:
    """Ports of InfiniBand and RoCE devices; EFA has its own check."""
    return [port for device in devices if not device.efa for port in device.ports]


def judge_troubles(devices: tuple[Device, ...]) -> list[Finding]:
    """Findings about devices that cannot be read: a fault of those that do not answer where others do."""
    return [
        _trouble.judge(device.troubles[0], device=device.name, answering=_count_answering(device.troubles[0], devices))
        for device in devices
        if device.troubles
    ]


def judge_port_trouble(
    port: Port, devices: tuple[Device, ...], *, name: str | None = None, **values: Any
) -> Finding | None:
    """The same for a port, under its own name or `name`; None: all its files were read."""
    if port.trouble is None:
        return None
    answering = _count_answering(port.trouble, devices)
    return _trouble.judge(port.trouble, device=name or port.name, answering=answering, **values)


def _count_answering(trouble: _trouble.Trouble, devices: tuple[Device, ...]) -> int:
    """Number of devices of which the same file was read."""
    file = trouble.path.rpartition("/")[2]
    silent = [device for device in devices if any(other.path.endswith(f"/{file}") for other in device.every_trouble)]
    return len(devices) - len(silent)


def _device(host: Host, name: str) -> Device:
    folder = f"{FOLDER}/{name}"
    troubles: list[_trouble.Trouble] = []
    reader = _Reader(host=host, folder=folder, troubles=troubles)
    shown = reader.text("device/uevent")
    uevent = shown or ""
    driver = re.search(r"^DRIVER=(\w[\w.-]*)$", uevent, re.MULTILINE)
    if shown is not None and driver is None:  # soft RoCE has no such file; a device on a bus has a driver
        reader.note("device/uevent", f"the driver of {name} cannot be read")
    slot = re.search(r"^PCI_SLOT_NAME=(\S+)$", uevent, re.MULTILINE)
    numbers = [text for text in reader.names("ports") or () if text.isdecimal()]
    board = (reader.text("board_id") or "").strip()
    refused = any(trouble.path.endswith("/board_id") for trouble in troubles)
    if not re.fullmatch(r"[\w. ()-]*", board):
        reader.note("board_id", f"the board of {name} is {board[:40]!r}")
        board = ""
    elif not board and not refused and driver is not None and driver[1].startswith("mlx"):
        reader.note("board_id", f"the board of {name} is {board[:40]!r}")
    if not numbers and not any(trouble.path.endswith("/ports") for trouble in troubles):
        reader.note("ports", f"the RDMA device {name} shows no port")
    return Device(
        name=name,
        driver=driver[1] if driver else None,
        address=slot[1].lower() if slot else None,
        board=board,
        ports=tuple(_port(host, name, int(number)) for number in sorted(numbers, key=int)),
        interfaces=reader.names("device/net") or (),
        troubles=tuple(troubles),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Reader of the files of one folder, which notes those that cannot be read."""

    host: Host
    folder: str
    troubles: list[_trouble.Trouble]

    def text(self, name: str) -> str | None:
        try:
            return system_files.read_optional(self.host, f"{self.folder}/{name}")
        except HostError as error:
            self.troubles.append(_trouble.of(f"{self.folder}/{name}", error))
            return None

    def names(self, name: str) -> tuple[str, ...] | None:
        try:
            return system_files.list_optional(self.host, f"{self.folder}/{name}")
        except HostError as error:
            self.troubles.append(_trouble.of(f"{self.folder}/{name}", error))
            return None

    def note(self, name: str, reason: str) -> None:
        self.troubles.append(_trouble.Trouble(path=f"{self.folder}/{name}", reason=reason, code=None))


def _port(host: Host, device: str, number: int) -> Port:
    troubles: list[_trouble.Trouble] = []
    reader = _Reader(host=host, folder=f"{FOLDER}/{device}/ports/{number}", troubles=troubles)
    # Every port has these files; a port without them counts as not up.
    state, physical, layer = (reader.text(name) or "" for name in ("state", "phys_state", "link_layer"))
    rate = reader.text("rate") or ""
    # rate_show gives EINVAL for a width that it does not know, as where no plug is in (rdma-core pull request 239).
    kept = [trouble for trouble in troubles if not (trouble.absent and trouble.path.endswith("/rate"))]
    return Port(
        device=device,
        number=number,
        state=ibstat.parse_state(state),
        physical_state=ibstat.parse_state(physical),
        rate_gbps=ibstat.parse_rate(rate),
        link_layer=layer.strip() or "unknown",
        lanes=ibstat.parse_width(rate),
        trouble=kept[0] if kept else None,
    )
