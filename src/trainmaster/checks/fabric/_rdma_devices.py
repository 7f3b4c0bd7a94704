"""RDMA devices of a machine (InfiniBand, RoCE, EFA), from /sys/class/infiniband.

These files need no tool and no privilege, and containers have them too. The kind of a device follows from its driver
(EFA) and from the link layer of its ports.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainmaster.checks import system_files
from trainmaster.core.errors import FileMissing, HostError
from trainmaster.node.host import Host
from trainmaster.node.parse import ibstat

FOLDER = system_files.RDMA
# drivers/infiniband/core/sysfs.c: state_show and phys_state_to_str
STATES = ("NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER")
LAYERS = ("InfiniBand", "Ethernet", "Unspecified")
PHYSICAL = (
    "Sleep", "Polling", "Disabled", "PortConfigurationTraining", "LinkUp", "LinkErrorRecovery", "Phy Test",
)  # fmt: skip


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
    driver: str | None  # efa, mlx5_core; None where it does not sit on a bus (soft RoCE)
    board: str  # its model: devices of one model are alike
    ports: tuple[Port, ...]
    address: str | None  # on the PCI bus; None: not shown
    interfaces: tuple[str, ...]  # its network interfaces in this network namespace

    @property
    def efa(self) -> bool:
        return self.driver == "efa"


def read(host: Host) -> tuple[Device, ...]:
    """Every RDMA device; empty if the kernel has no such class."""
    return tuple(_device(host, name) for name in system_files.list_rdma(host))


def ports(devices: tuple[Device, ...]) -> list[Port]:
    """Ports of InfiniBand and RoCE devices; EFA has its own check."""
    return [port for device in devices if not device.efa for port in device.ports]


def _device(host: Host, name: str) -> Device:
    folder = f"{FOLDER}/{name}"
    shown = system_files.read_optional(host, f"{folder}/device/uevent")
    uevent = shown or ""
    driver = re.search(r"^DRIVER=(\w[\w-]*)$", uevent, re.MULTILINE)
    if shown is not None and driver is None:  # soft RoCE has no such file; a device on a bus has a driver
        raise HostError(f"the driver of {name} cannot be read")
    slot = re.search(r"^PCI_SLOT_NAME=(\S+)$", uevent, re.MULTILINE)
    numbers = [text for text in system_files.list_optional(host, f"{folder}/ports") or () if text.isdecimal()]
    board = (system_files.read_optional(host, f"{folder}/board_id") or "").strip()
    if not re.fullmatch(r"[\w. ()-]*", board) or (not board and driver is not None and driver[1].startswith("mlx")):
        raise HostError(f"the board of {name} is {board[:40]!r}")
    if not numbers:
        raise HostError(f"the RDMA device {name} shows no port")
    return Device(
        name=name,
        driver=driver[1] if driver else None,
        address=slot[1].lower() if slot else None,
        board=board,
        ports=tuple(_port(host, name, int(number)) for number in sorted(numbers, key=int)),
        interfaces=system_files.list_optional(host, f"{folder}/device/net") or (),
    )


def _port(host: Host, device: str, number: int) -> Port:
    folder = f"{FOLDER}/{device}/ports/{number}"

    def text(name: str) -> str:
        try:
            return host.read(f"{folder}/{name}")
        except FileMissing:
            return ""  # every port has these files; a port without them counts as not up

    return Port(
        device=device,
        number=number,
        state=ibstat.parse_state(text("state")),
        physical_state=ibstat.parse_state(text("phys_state")),
        rate_gbps=ibstat.parse_rate(text("rate")),
        link_layer=text("link_layer").strip() or "unknown",
        lanes=ibstat.parse_width(text("rate")),
    )
