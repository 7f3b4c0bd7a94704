"""Adapters that are no rail of the training fabric, and what shows it.

NVSentinel tells roles apart by the default route, then by the NUMA nodes of the GPUs
(https://github.com/NVIDIA/NVSentinel, health-monitors/nic-health-monitor/pkg/topology). The functions that manage the
NVSwitches of HGX and DGX B200 and B300 belong to one ConnectX-7 with four of them on a PCIe link of two lanes; the
firmware limits them, and their counters answer EINVAL (Fabric Manager user guide, "LPF";
https://github.com/prometheus/node_exporter/issues/3434, https://github.com/leptonai/gpud/issues/1164).

All evidence is optional: what cannot be read gives no role, and an adapter without one is judged as part of the fabric.
"""

from __future__ import annotations

import errno
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from trainmaster.checks import system_files
from trainmaster.checks.fabric import _adapters
from trainmaster.checks.fabric._rdma_devices import Device, Port
from trainmaster.core.errors import FileUnreadable, HostError, NotCaptured
from trainmaster.node.host import Host

NET = "/sys/class/net"
FUNCTIONS = 4  # of the ConnectX-7 that manages NVSwitches; adapters of a fabric have one for each port, two at most
BRIDGE_LANES = 2
# What a port that never had a link counts: nothing (InfiniBand specification, PortCounters; names of bnxt_re).
HISTORY = (
    ("counters/link_downed", "counters/port_rcv_data", "counters/port_xmit_data"),
    ("hw_counters/rx_pkts", "hw_counters/tx_pkts"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Devices and ports that are not meant for training, with the proof of each."""

    bridges: Mapping[str, str] = field(default_factory=dict)  # device: it manages NVSwitches
    routed: Mapping[str, str] = field(default_factory=dict)  # device: it carries the default route
    distant: Mapping[str, str] = field(default_factory=dict)  # device: no GPU is on its NUMA node
    unused: Mapping[str, str] = field(default_factory=dict)  # port: it never had a link


def read(host: Host, devices: tuple[Device, ...]) -> Roles:
    """Roles of devices; of those that only matter for a port without a link, if there is one."""
    down = [port for device in devices if not device.efa for port in device.ports if not port.up]
    return Roles(
        bridges=find_bridges(host, devices),
        routed=find_routed(host, devices),
        distant=_find_distant(host, [device for device in devices if any(port in down for port in device.ports)]),
        unused={port.name: proof for port in down if (proof := _find_history(host, port)) is not None},
    )


def find_bridges(host: Host, devices: tuple[Device, ...]) -> dict[str, str]:
    """Functions of the adapter that manages NVSwitches: four of one card, of a board of its own, and limited."""
    cards: dict[str, list[Device]] = defaultdict(list)
    for device in devices:
        if device.address is not None and device.driver == "mlx5_core" and not is_virtual(host, device):
            cards[_adapters.card_of(device.address)].append(device)
    found: dict[str, str] = {}
    for card, functions in cards.items():
        boards = {device.board for device in functions}
        elsewhere = {device.board for device in devices if device not in functions}
        layers = {port.link_layer for device in functions for port in device.ports if port.trouble is None}
        if len(functions) != FUNCTIONS or boards & elsewhere or layers - {"InfiniBand"}:
            continue
        limit = next((limit for device in functions if (limit := _find_limit(host, device)) is not None), None)
        if limit is not None:
            proof = f"{card} has {FUNCTIONS} functions of the board {', '.join(sorted(boards))}, and {limit}"
            found |= {device.name: proof for device in functions}
    return found


def is_virtual(host: Host, device: Device) -> bool:
    """Whether it is a virtual function or a scalable one. Where that is unknown, it counts as a physical one."""
    try:
        return device.scalable or (device.address is not None and _adapters.is_virtual(host, device.address))
    except HostError:
        return False


def _find_limit(host: Host, device: Device) -> str | None:
    """What shows that a function is limited: a link of two lanes, or a counter that it does not have."""
    lanes = read_quietly(host, f"{system_files.PCI}/{device.address}/max_link_width")
    if lanes is not None and lanes.isdecimal() and 0 < int(lanes) <= BRIDGE_LANES:
        return f"max_link_width of {device.name} is {lanes}"
    for port in device.ports:
        try:
            host.read(f"{port.folder}/counters/link_downed")
        except FileUnreadable as error:
            if error.code == errno.EINVAL:
                return f"counters/link_downed of {port.name} answers Invalid argument"
        except HostError:
            continue
    return None


def find_routed(host: Host, devices: tuple[Device, ...]) -> dict[str, str]:
    """Devices that carry the default route. A damaged table raises: it would make a rail of each adapter."""
    try:
        rows = [row.split() for row in system_files.read_routes(host)]
    except NotCaptured:
        return {}
    default = {row[0] for row in rows if len(row) > 1 and row[1] == "00000000"}
    if not default or not any(device.interfaces for device in devices):
        return {}
    carrying = default | {below for name in default for below in _find_lower(host, name)}
    return {
        device.name: f"/proc/net/route: the default route leads through {', '.join(sorted(default))}"
        for device in devices
        if carrying & set(device.interfaces)
    }


def _find_lower(host: Host, name: str, depth: int = 3) -> set[str]:
    """Interfaces below a bond, a bridge or a VLAN: its folder has a link lower_NAME for each."""
    try:
        entries = system_files.list_optional(host, f"{NET}/{name}") or ()
    except HostError:
        return set()
    lower = {entry.removeprefix("lower_") for entry in entries if entry.startswith("lower_")}
    return lower.union(*(_find_lower(host, one, depth - 1) for one in lower)) if depth else lower


def _find_distant(host: Host, devices: list[Device]) -> dict[str, str]:
    """Devices on a NUMA node without a GPU. None are, unless the node of each GPU is known."""
    placed = [device for device in devices if device.address is not None]
    if not placed:
        return {}
    try:
        gpus = system_files.read_pci(host, system_files.NVIDIA, kind="0x03")
    except HostError:
        return {}
    homes = {_read_node(host, address) for address in gpus}
    if not homes or None in homes:
        return {}
    return {
        device.name: f"NUMA node {node}; the GPUs are on {', '.join(sorted(map(str, homes)))}"
        for device in placed
        if (node := _read_node(host, device.address or "")) is not None and node not in homes
    }


def _read_node(host: Host, address: str) -> int | None:
    text = read_quietly(host, f"{system_files.PCI}/{address}/numa_node")
    return int(text) if text is not None and re.fullmatch(r"\d{1,4}", text) else None


def _find_history(host: Host, port: Port) -> str | None:
    """What shows that a port never had a link since its driver was loaded; None: it had one, or that is unknown."""
    if port.physical_state not in ("Polling", "Disabled", "Sleep"):
        return None
    for names in HISTORY:
        counted = [read_quietly(host, f"{port.folder}/{name}") for name in names]
        if None not in counted:
            return f"{', '.join(names)} are 0" if set(counted) == {"0"} else None
    return None


def read_quietly(host: Host, path: str) -> str | None:
    """Text of a file that is evidence only; None: it cannot be read."""
    try:
        return host.read(path).strip()
    except HostError:
        return None
