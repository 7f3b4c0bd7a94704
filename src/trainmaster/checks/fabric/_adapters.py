"""InfiniBand and RoCE adapters on the PCI bus without an RDMA device: no driver, no mlx5_ib, or given to a VM.

Functions of one card count together: a bond of two ports is one RDMA device of the first function.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainmaster.checks import system_files
from trainmaster.checks.fabric._rdma_devices import Device
from trainmaster.core.errors import HostError
from trainmaster.node.host import Host

PCI = system_files.PCI
# Drivers that hand a device to a virtual machine or to a program: no RDMA device of this kernel is meant to be there.
PASSED = ("vfio-pci", "mlx5_vfio_pci", "pci-stub", "pciback", "xen-pciback", "uio_pci_generic", "igb_uio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Addresses of adapters without an RDMA device, by reason."""

    unbound: tuple[str, ...] = ()  # no driver, or an InfiniBand adapter without mlx5_ib
    plain: tuple[str, ...] = ()  # Ethernet with its driver and without RDMA, where equal cards have RDMA
    alone: tuple[str, ...] = ()  # Ethernet with its driver and without RDMA, and no equal card has it
    passed: tuple[tuple[str, str], ...] = ()  # address and driver: a virtual function, or a second port
    taken: tuple[tuple[str, str], ...] = ()  # address and driver: a whole card


def read(host: Host, devices: tuple[Device, ...]) -> Adapters:
    """Adapters of the PCI bus, compared with the RDMA devices of the kernel."""
    if any(device.driver is not None for device in devices) and not host.list(PCI):
        raise HostError(f"{PCI} is empty, but {devices[0].name} has a driver")
    cards = {card_of(device.address) for device in devices if device.address is not None}
    infiniband = system_files.read_pci(host, system_files.MELLANOX, kind="0x0207")
    ethernet = system_files.read_pci(host, system_files.MELLANOX, kind="0x0200")
    if devices and not cards:
        infiniband = ()  # the devices do not show their addresses here
    left = [address for address in (*infiniband, *ethernet) if card_of(address) not in cards]
    if len({card_of(address) for address in left}) <= sum(device.unknown for device in devices):
        return Adapters()  # they may be those whose address cannot be read, which is told of them
    drivers = {address: _driver(host, address, certain=address in ethernet) for address in left}
    given = [(address, driver) for address, driver in drivers.items() if driver in PASSED]
    whole = [pair for pair in given if pair[0].endswith(".0") and not is_virtual(host, pair[0])]
    kept = [address for address in left if drivers[address] not in PASSED]
    unbound = [address for address in kept if address in infiniband or drivers[address] is None]
    bound = [address for address in kept if address not in unbound]
    plain, alone = _compare(host, bound, ethernet, devices) if cards or not devices else ([], [])
    return Adapters(
        unbound=tuple(unbound),
        plain=tuple(plain),
        alone=tuple(alone),
        passed=tuple(pair for pair in given if pair not in whole),
        taken=tuple(whole),
    )


def card_of(address: str) -> str:
    """Address without the function."""
    return address.rpartition(".")[0]


def _compare(
    host: Host, bound: list[str], ethernet: tuple[str, ...], devices: tuple[Device, ...]
) -> tuple[list[str], list[str]]:
    """Ethernet adapters with a driver: those of which an equal one has RDMA, and the rest. Virtual functions of a pod
    may have their RDMA device in its network namespace, and are left out."""
    bound = [address for address in bound if not is_virtual(host, address)]
    if not bound:
        return [], []
    having = {device.address for device in devices if device.address is not None}
    equal = {_model(host, address) for address in ethernet if address in having}
    plain = [address for address in bound if _model(host, address) in equal]
    return plain, [address for address in bound if address not in plain]


def _model(host: Host, address: str) -> str | None:
    """PCI device id; None where the bus does not show it."""
    text = system_files.read_optional(host, f"{PCI}/{address}/device")
    if text is not None and not re.fullmatch(r"0x[0-9a-f]{4}", text.strip(), re.IGNORECASE):
        raise HostError(f"the PCI bus is unreadable: {text.strip()!r:.40} is no device id")
    return text and text.strip().lower()


def _driver(host: Host, address: str, *, certain: bool) -> str | None:
    """Name of the driver; None: the device has none. `certain`: an unreadable answer raises.

    An InfiniBand adapter without an RDMA device is a fault whatever its driver, unless that passes it on.
    """
    try:
        text = host.read(f"{PCI}/{address}/uevent")
    except HostError:
        if certain:
            raise
        return None
    if certain and "PCI_SLOT_NAME=" not in text and "DRIVER=" not in text:
        raise HostError(f"{PCI}/{address}/uevent is unreadable: {text.strip()!r:.40}")
    match = re.search(r"^DRIVER=(\S+)$", text, re.MULTILINE)
    return match[1] if match else None


def is_virtual(host: Host, address: str) -> bool:
    """Whether it is a virtual function of SR-IOV: those have a link to their physical one."""
    return system_files.list_optional(host, f"{PCI}/{address}/physfn") is not None
