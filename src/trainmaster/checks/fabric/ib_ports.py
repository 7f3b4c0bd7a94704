"""Every InfiniBand or RoCE port is up, at its rate, on its link layer. A dead port slows every collective on its rail.

Sources: /sys, and ibstat where it is installed and a port is InfiniBand. A port is up only if both agree.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from trainmaster.checks import system_files
from trainmaster.checks.fabric import _rdma_devices
from trainmaster.core.errors import CommandMissing, HostError
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok, skip, warn
from trainmaster.node.host import Host
from trainmaster.node.parse import ParseError, ibstat

LEVEL = 1
DARK_PORTS = 4  # ours: one or two Ethernet ports without a link may be spares
_CABLE = "reseat or replace its cable or transceiver, see the switch port, then rerun"
_ACTIONS = {
    "Polling": _CABLE,  # it searches for a link partner
    "Disabled": "enable it: `ibportstate -D 0 1 enable` on the node, or the port of its switch",
    "LinkErrorRecovery": _CABLE,
    "INIT": "start or repair the subnet manager: the link is up and has no LID yet",
    "ARMED": "start or repair the subnet manager: the configuration of the port is not finished",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    devices: tuple[_rdma_devices.Device, ...]
    unbound: tuple[str, ...]  # InfiniBand and RoCE adapters on the PCI bus without an RDMA device
    idle: frozenset[str]  # devices whose network interface an administrator has switched off, or that show none
    second: ibstat.Ibstat | None  # what ibstat says; None: not installed, or no port speaks InfiniBand
    trouble: str | None  # why ibstat cannot confirm
    gpus: bool = False  # a training node: its adapters are meant to have a link


def read(host: Host) -> Ports:
    devices = _rdma_devices.read(host)
    found = _rdma_devices.ports(devices)
    controllers = _unbound(host, devices)
    second, trouble = None, None
    # A RoCE node may do without the module that ibstat needs.
    if any(port.link_layer == "InfiniBand" for port in found):
        second, trouble = _ask_ibstat(host, found)
    return Ports(
        devices=devices,
        unbound=controllers,
        gpus=system_files.has_gpus(host),
        idle=frozenset(device.name for device in devices if not _switched_on(host, device)),
        second=second,
        trouble=trouble,
    )


def judge(ports: Ports, expect: Expect) -> list[Finding]:
    found = _rdma_devices.ports(ports.devices)
    if expect.ib_ports == 0:
        return [skip("the profile expects no InfiniBand port", proof="ib_ports=0 is stated")]
    stated = expect.ib_ports is not None or expect.ib_rate_gbps is not None or expect.ib_link_layer is not None
    stated = stated or expect.transport == "IB"
    if not found:
        return [_judge_none(ports, expect, stated=stated)]
    wrong = {port.name: why for port in found if (why := _wrong(port, ports, expect, found))}
    fit = len(found) - len(wrong)
    values: dict[str, Any] = {"ports": len(found), "fit": fit, "up": sum(port.up for port in found)}
    if expect.ib_ports is not None and fit >= expect.ib_ports:
        # More ports than expected (storage, spares): those that do not fit are listed and are no fault.
        findings = [ok(f"{fit} of {expect.ib_ports} expected ports are up", **values)]
        proof = f"{fit} of {expect.ib_ports} expected ports are up without it"
        findings += [skip(f"{why}; not one of those expected", proof=proof, device=name) for name, why in wrong.items()]
    else:
        # A training node with adapters of which none has a link is no node of a cluster.
        many = len(found) >= DARK_PORTS or any(port.link_layer == "InfiniBand" for port in found)
        dark = ports.gpus and many and not any(port.up for port in found)
        findings = [_judge_port(port, wrong.get(port.name), ports, stated=stated or dark) for port in found]
        if expect.ib_ports is not None:
            reason = f"{fit} of {expect.ib_ports} ports fit: {', '.join(wrong) or 'the rest are not there'}"
            absent = expect.ib_ports - len(found)
            action = f"find the {absent} ports that are not there" if absent > 0 else "mend the ports named here"
            findings.insert(0, fail(reason, action=action, **values))
    if ports.unbound:
        reason = f"{len(ports.unbound)} adapters on the PCI bus have no RDMA device: {', '.join(ports.unbound)[:120]}"
        say = fail if stated or len(ports.unbound) > 1 or ports.gpus else warn
        findings.append(say(reason, action="load mlx5_ib (`modprobe mlx5_ib`), and see dmesg if it refuses"))
    if ports.trouble is not None:
        action = "run `ibstat` by hand; load ib_umad, and give the container /dev/infiniband"
        findings.append(error(f"ibstat cannot confirm the ports: {ports.trouble}", action=action))
    return findings


def _judge_none(ports: Ports, expect: Expect, *, stated: bool) -> Finding:
    if ports.unbound:
        reason = f"no driver serves the adapters at {', '.join(ports.unbound)[:120]}"
        return fail(reason, action="load mlx5_ib (`modprobe mlx5_ib`), and see dmesg if it refuses")
    if stated:
        reason = f"0 of {expect.ib_ports or 'the expected'} ports: there is no InfiniBand or RoCE device"
        return fail(reason, action="use a node with that fabric, or give the container its RDMA devices")
    proof = "/sys/class/infiniband and the PCI bus show no InfiniBand or RoCE device"
    return skip("no InfiniBand or RoCE device here and none expected", proof=proof)


def _wrong(port: _rdma_devices.Port, ports: Ports, expect: Expect, found: list[_rdma_devices.Port]) -> str | None:
    """Fault of a port as a sentence; None if it fits."""
    if expect.ib_link_layer is not None and port.link_layer != expect.ib_link_layer:
        return f"link layer {port.link_layer}, not {expect.ib_link_layer}"
    if not port.up:
        return f"{port.state or 'no state'} and {port.physical_state or 'no physical state'}"
    second = _second(port, ports.second)
    if second is not None and not second.up:
        return f"Active in /sys, but {second.state} and {second.physical_state} for ibstat"
    if port.rate_gbps is None:
        return "up, but its rate cannot be read"
    least = expect.ib_rate_gbps
    if least is not None and port.rate_gbps < least:
        return f"{port.rate_gbps:g} of {least:g} Gb/s"
    usual = _usual_rate(port, ports.devices, found) if least is None else None
    if usual is not None and port.rate_gbps < usual:
        return f"{port.rate_gbps:g} Gb/s, where other ports of this board run at {usual:g}"
    return None


def _judge_port(port: _rdma_devices.Port, wrong: str | None, ports: Ports, *, stated: bool) -> Finding:
    values: dict[str, Any] = {
        "state": port.state,
        "physical_state": port.physical_state,
        "rate_gbps": port.rate_gbps,
        "link_layer": port.link_layer,
    }
    if not port.readable:
        action = f"read {port.folder} by hand"
        return error("its state or link layer cannot be read", action=action, device=port.name, **values)
    if wrong is None:
        return ok(f"up, {port.rate_gbps:g} Gb/s, {port.link_layer}", device=port.name, **values)
    if not stated and not port.up and port.link_layer == "Ethernet" and port.device in ports.idle:
        proof = "its network interface is administratively down or in another namespace"
        return skip(f"{wrong}: no link is intended", proof=proof, device=port.name, **values)
    action = _ACTIONS.get(port.physical_state or "") or _ACTIONS.get(port.state or "") or _CABLE
    if port.up and "link layer" in wrong:
        action = "set the port's type with `mlxconfig set LINK_TYPE_P1=1` (InfiniBand) or 2 (Ethernet), then reboot"
    return (fail if stated else warn)(wrong, action=action, device=port.name, **values)


def _usual_rate(
    port: _rdma_devices.Port, devices: tuple[_rdma_devices.Device, ...], found: list[_rdma_devices.Port]
) -> float | None:
    """Rate of the majority of ports with the same board and link layer; None without a clear majority."""
    board = {device.name: device.board for device in devices}
    rates = Counter(
        other.rate_gbps
        for other in found
        if other.up
        and other.rate_gbps
        and other.link_layer == port.link_layer
        and board[other.device] == board[port.device]
    )
    return next((rate for rate, count in rates.items() if count >= max(3, 0.75 * rates.total())), None)


def _second(port: _rdma_devices.Port, told: ibstat.Ibstat | None) -> ibstat.Port | None:
    for adapter in told.adapters if told else ():
        if adapter.name == port.device:
            return next((other for other in adapter.ports if other.number == port.number), None)
    return None


def _ask_ibstat(host: Host, found: list[_rdma_devices.Port]) -> tuple[ibstat.Ibstat | None, str | None]:
    try:
        ran = host.run("ibstat")
    except CommandMissing:
        return None, None
    try:
        told = ibstat.parse(ran.stdout + ran.stderr)
    except ParseError as wrong:
        return None, str(wrong)
    listed = {(adapter.name, one.number) for adapter in told.adapters for one in adapter.ports}
    absent = [
        port.name for port in found if port.link_layer == "InfiniBand" and (port.device, port.number) not in listed
    ]
    problems = [*told.errors, *told.faults, *(f"it does not list {name}" for name in absent)] or (
        [f"it ended with {ran.exit_code}"] if ran.exit_code else []
    )
    return told, "; ".join(problems[:3]) or None


def _unbound(host: Host, devices: tuple[_rdma_devices.Device, ...]) -> tuple[str, ...]:
    """Adapters on the PCI bus without an RDMA device: InfiniBand (0x0207), or Ethernet (0x0200) without any driver.

    Functions of one card count together: a bond of two ports is one RDMA device of the first. An Ethernet adapter with
    a driver is an ordinary network card.
    """
    cards = {device.address.rpartition(".")[0] for device in devices if device.address is not None}
    infiniband = system_files.read_pci(host, system_files.MELLANOX, kind="0x0207")
    if devices and not cards:
        infiniband = ()  # the devices do not show their addresses here
    ethernet = system_files.read_pci(host, system_files.MELLANOX, kind="0x0200")
    alone = [address for address in infiniband if address.rpartition(".")[0] not in cards]
    return (*alone, *(a for a in ethernet if a.rpartition(".")[0] not in cards and not _has_driver(host, a)))


def _has_driver(host: Host, address: str) -> bool:
    try:
        return "DRIVER=" in host.read(f"{system_files.PCI}/{address}/uevent")
    except HostError:
        return True  # not shown: nothing speaks against it


def _switched_on(host: Host, device: _rdma_devices.Device) -> bool:
    """Whether one of its interfaces is administratively up, so that a link is intended."""
    flags = [system_files.read_number(host, f"/sys/class/net/{name}/flags", base=16) for name in device.interfaces]
    return any(flag & 1 for flag in flags)  # IFF_UP
