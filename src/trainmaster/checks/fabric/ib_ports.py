"""Every InfiniBand or RoCE port is up, at its rate, on its link layer. A dead port slows every collective on its rail.

Sources: /sys, and ibstat where it is installed and a port is InfiniBand. A port is up only if both agree; of two rates
the lower counts, and a rate or link layer of which they differ is an error. The state of a port is in
/sys/class/infiniband also where its network interface is down or in another namespace. On a node with GPUs, four equal
adapters are rails: each must have a link, stated or not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from trainmaster.checks import system_files
from trainmaster.checks.comparison import adapters, hardware
from trainmaster.checks.fabric import _adapters, _rdma_devices
from trainmaster.core.errors import CommandMissing
from trainmaster.core.expect import Expect, implies_rdma
from trainmaster.core.results import Finding, Verdict, error, fail, ok, skip, warn
from trainmaster.node.host import Host
from trainmaster.node.parse import ParseError, ibstat

LEVEL = 1
GPU = False
EXPECTS = ("ib_ports", "ib_rate_gbps", "ib_link_layer")
COMPARES = (
    adapters("ports", "fabric ports"),
    hardware("rate_gbps", "rate of the fabric ports", "reseat or replace the cable", unit="Gb/s"),
)
METRICS: dict[str, str] = {}
RAILS = 4  # ours: so many equal adapters are the rails of a node; one or two without a link may be spares
_CABLE = "reseat or replace its cable or transceiver, see the switch port, then rerun"
_ACTIONS = {
    "Polling": _CABLE,  # it searches for a link partner
    "Disabled": "enable it: `ibportstate -D 0 1 enable` on the node, or the port of its switch",
    "LinkErrorRecovery": _CABLE,
    "INIT": "start or repair the subnet manager: the link is up and has no LID yet",
    "ARMED": "start or repair the subnet manager: the configuration of the port is not finished",
}


_LOAD = "load mlx5_ib (`modprobe mlx5_ib`), and see dmesg if it refuses"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    devices: tuple[_rdma_devices.Device, ...]
    adapters: _adapters.Adapters  # on the PCI bus, without an RDMA device
    idle: frozenset[str]  # devices of which an administrator has switched every interface off
    second: ibstat.Ibstat | None  # what ibstat says; None: not installed, or no port speaks InfiniBand
    trouble: str | None  # why ibstat cannot confirm
    gpus: bool = False  # a training node: its adapters are meant to have a link


def read(host: Host) -> Ports:
    devices = _rdma_devices.read(host)
    port_list = _rdma_devices.ports(devices)
    adapters = _adapters.read(host, devices)
    second, trouble = None, None
    # A RoCE node may do without the module that ibstat needs.
    if any(port.link_layer == "InfiniBand" for port in port_list):
        second, trouble = _run_ibstat(host, port_list)
    return Ports(
        devices=devices,
        adapters=adapters,
        gpus=system_files.has_gpus(host),
        idle=frozenset(device.name for device in devices if _switched_off(host, device)),
        second=second,
        trouble=trouble,
    )


def judge(ports: Ports, expect: Expect) -> list[Finding]:
    port_list = [_take_lower_rate(port, ports.second) for port in _rdma_devices.ports(ports.devices)]
    if expect.ib_ports == 0 and (implied := implies_rdma(expect)):
        action = "state the number of ports, or leave the other expectation out"
        return [error(f"ib_ports=0 and {implied[0]} are expected: both cannot hold", action=action)]
    if expect.ib_ports == 0:
        return [skip("the profile expects no InfiniBand port", proof="ib_ports=0 is stated")]
    stated = expect.ib_ports is not None or expect.ib_rate_gbps is not None or expect.ib_link_layer is not None
    stated = stated or expect.transport == "IB"
    findings = _judge_ports(ports, port_list, expect, stated=stated) if port_list else []
    findings += _judge_adapters(ports, stated=stated)
    if ports.trouble is not None:
        action = "run `ibstat` by hand; load ib_umad, and give the container /dev/infiniband"
        findings.append(error(f"ibstat cannot confirm the ports: {ports.trouble}", action=action))
    if not port_list and stated:
        reason = f"0 of {expect.ib_ports or 'the expected'} ports: there is no InfiniBand or RoCE device"
        action = "use a node with that fabric, or give the container its RDMA devices"
        findings.insert(0, fail(reason, action=action))
    if not findings:
        proof = "/sys/class/infiniband and the PCI bus show no InfiniBand or RoCE device"
        return [skip("no InfiniBand or RoCE device here and none expected", proof=proof)]
    return findings


def _judge_ports(ports: Ports, port_list: list[_rdma_devices.Port], expect: Expect, *, stated: bool) -> list[Finding]:
    faults = {port.name: why for port in port_list if (why := _find_fault(port, ports, expect, port_list))}
    fit = len(port_list) - len(faults)
    values: dict[str, Any] = {"ports": len(port_list), "fit": fit, "up": sum(port.up for port in port_list)}
    if expect.ib_ports is not None and fit >= expect.ib_ports:
        # More ports than expected (storage, spares): those that do not fit are listed and are no fault.
        proof = f"{fit} of {expect.ib_ports} expected ports are up without it"
        spare = [skip(f"{why}; not one of those expected", proof=proof, device=name) for name, why in faults.items()]
        return [ok(f"{fit} of {expect.ib_ports} expected ports are up", **values), *spare]
    findings = [_judge_port(port, faults.get(port.name), ports, port_list, stated=stated) for port in port_list]
    if expect.ib_ports is None:
        # The numbers of the node, for the comparison of nodes: a port that is missing has no finding of its own.
        reason = f"{values['up']} of {len(port_list)} ports are up"
        if all(finding.verdict is Verdict.SKIP for finding in findings):
            node = skip(reason, proof="no link of them is intended", **values)
        else:
            node = ok(reason, **values) if values["up"] else warn(reason, action="mend the ports named here", **values)
        findings.insert(0, node)
    else:
        reason = f"{fit} of {expect.ib_ports} ports fit: {', '.join(faults) or 'the rest are not there'}"
        absent = expect.ib_ports - len(port_list)
        action = f"find the {absent} ports that are not there" if absent > 0 else "mend the ports named here"
        findings.insert(0, fail(reason, action=action, **values))
    return findings


def _judge_adapters(ports: Ports, *, stated: bool) -> list[Finding]:
    """Findings about adapters on the PCI bus that have no RDMA device."""
    on_bus, findings = ports.adapters, []
    if on_bus.unbound:
        reason = f"{len(on_bus.unbound)} adapters have no driver or no RDMA device: {_some(on_bus.unbound)}"
        say = fail if stated or len(on_bus.unbound) > 1 or ports.gpus or not ports.devices else warn
        findings.append(say(reason, action=_LOAD))
    if on_bus.plain:
        reason = f"{len(on_bus.plain)} adapters have a driver and no RDMA device, where equal ones have: "
        findings.append((fail if stated or ports.gpus else warn)(reason + _some(on_bus.plain), action=_LOAD))
    if on_bus.alone and (stated or (ports.gpus and len(on_bus.alone) >= RAILS)):
        reason = f"{len(on_bus.alone)} adapters are network cards without an RDMA device: {_some(on_bus.alone)}"
        action = f"{_LOAD}; in a container, give it the RDMA devices"
        findings.append((fail if stated else warn)(reason, action=action))
    if on_bus.taken and (stated or ports.gpus):
        names = tuple(address for address, _ in on_bus.taken)
        reason = f"{len(names)} adapters are given to a virtual machine ({on_bus.taken[0][1]}): {_some(names)}"
        findings.append(warn(reason, action="leave jobs on this host without them, or bind them to mlx5_core again"))
    for address, driver in (*on_bus.passed, *(() if stated or ports.gpus else on_bus.taken)):
        proof = f"{system_files.PCI}/{address}/uevent: DRIVER={driver}"
        findings.append(skip("passed through to a virtual machine", proof=proof, device=address))
    return findings


def _find_fault(
    port: _rdma_devices.Port, ports: Ports, expect: Expect, port_list: list[_rdma_devices.Port]
) -> str | None:
    """Fault of a port as a sentence; None if it fits."""
    if expect.ib_link_layer is not None and port.link_layer != expect.ib_link_layer:
        return f"link layer {port.link_layer}, not {expect.ib_link_layer}"
    if expect.ib_link_layer is None and (odd := _odd_layer(port, ports, port_list)):
        return odd
    rails, lit = _count_rails(port, ports, port_list)
    if not port.up and ports.gpus and rails >= RAILS and not _card_up(port, ports, port_list):
        state = f"{port.state or 'no state'} and {port.physical_state or 'no physical state'}"
        return f"{state}, where {lit} of {rails} equal adapters have a link"
    if not port.up:
        return f"{port.state or 'no state'} and {port.physical_state or 'no physical state'}"
    second = _second(port, ports.second)
    if second is not None and not second.up:
        return f"Active in /sys, but {second.state} and {second.physical_state} for ibstat"
    if port.rate_gbps is None:
        return "up, but its rate cannot be read"  # not fit, and judged as an error
    least = expect.ib_rate_gbps
    if least is not None and port.rate_gbps < least:
        return f"{port.rate_gbps:g} of {least:g} Gb/s"
    usual = _usual_rate(port, ports.devices, port_list)[0] if least is None else None
    if usual is not None and port.rate_gbps < usual:
        return f"{port.rate_gbps:g} Gb/s, where other ports of this board run at {usual:g}"
    if least is None and port.link_layer == "InfiniBand" and port.lanes == 1:
        return f"{port.rate_gbps:g} Gb/s over one lane (1X)"  # Ethernet has ports of one lane, InfiniBand has none
    return _contradiction(port, ports)  # not fit, and judged as an error


def _judge_port(
    port: _rdma_devices.Port, fault: str | None, ports: Ports, port_list: list[_rdma_devices.Port], *, stated: bool
) -> Finding:
    values: dict[str, Any] = {
        "state": port.state,
        "physical_state": port.physical_state,
        "rate_gbps": port.rate_gbps,
        "link_layer": port.link_layer,
    }
    if not port.readable:
        action = f"read {port.folder} by hand"
        return error("its state or link layer cannot be read", action=action, device=port.name, **values)
    if port.up and port.rate_gbps is None:
        return error("up, but its rate cannot be read", action=f"read {port.folder}/rate", device=port.name, **values)
    if fault is None and port.lanes is None and any(other.lanes is not None for other in port_list):
        reason = "up, but its width cannot be read; other ports show theirs"
        return error(reason, action=f"read {port.folder}/rate", device=port.name, **values)
    if fault is None:
        return ok(f"up, {port.rate_gbps:g} Gb/s, {port.link_layer}", device=port.name, **values)
    contradiction = _contradiction(port, ports)
    if fault == contradiction:
        action = "run `ibstat` and read /sys again; see the counters of the port, and reset it if they still differ"
        return error(fault, action=action, device=port.name, **values)
    lit = any(_is_up(other, ports) for other in port_list)
    rail = ports.gpus and not _card_up(port, ports, port_list) and _count_rails(port, ports, port_list)[0] >= RAILS
    rail = rail or (ports.gpus and _odd_layer(port, ports, port_list) is not None)
    # A training node with adapters of which none has a link is no node of a cluster.
    dark = ports.gpus and not lit and port.link_layer == "InfiniBand"
    off = port.device in ports.idle or (not _interfaces(port, ports) and port.physical_state == "Disabled")
    if (
        not (stated or rail or dark)
        and not port.up
        and port.link_layer == "Ethernet"
        and off
        and (lit or not ports.gpus)
    ):
        proof = "its network interface is switched off" if port.device in ports.idle else "the port is Disabled"
        return skip(f"{fault}: no link is intended", proof=proof, device=port.name, **values)
    usual, certain = _usual_rate(port, ports.devices, port_list)
    slow = port.up and certain and usual is not None and (port.rate_gbps or 0) < usual
    rail = rail or (slow and ports.gpus and _count_rails(port, ports, port_list)[0] >= RAILS)
    action = _ACTIONS.get(port.physical_state or "") or _ACTIONS.get(port.state or "") or _CABLE
    if "link layer" in fault:
        action = "set the port's type with `mlxconfig set LINK_TYPE_P1=1` (InfiniBand) or 2 (Ethernet), then reboot"
    fault += f" ({contradiction})" if port.up and contradiction else ""
    return (fail if stated or rail or dark else warn)(fault, action=action, device=port.name, **values)


def _is_up(port: _rdma_devices.Port, ports: Ports) -> bool:
    second = _second(port, ports.second)
    return port.up and (second is None or second.up)


def _card(port: _rdma_devices.Port, ports: Ports) -> str:
    """Card of a port: functions of one PCI device are one card."""
    address = next(device.address for device in ports.devices if device.name == port.device)
    return port.device if address is None else _adapters.card_of(address)


def _card_up(port: _rdma_devices.Port, ports: Ports, port_list: list[_rdma_devices.Port]) -> bool:
    """Whether its card has a link: then this port may be a second one without a cable."""
    card = _card(port, ports)
    return any(_is_up(other, ports) for other in port_list if _card(other, ports) == card)


def _count_rails(port: _rdma_devices.Port, ports: Ports, port_list: list[_rdma_devices.Port]) -> tuple[int, int]:
    """Number of cards of this board and link layer, and how many of them have a link."""
    board = {device.name: device.board for device in ports.devices}
    equal = [
        other
        for other in port_list
        if board[other.device] == board[port.device] and other.link_layer == port.link_layer
    ]
    lit = {_card(other, ports) for other in equal if _is_up(other, ports)}
    return len({_card(other, ports) for other in equal}), len(lit)


def _odd_layer(port: _rdma_devices.Port, ports: Ports, port_list: list[_rdma_devices.Port]) -> str | None:
    """The link layer of a port, where its board is a rail of another layer; None if it is as it should be.

    Rails are 4, 8 or 16: seven adapters of InfiniBand and an equal one of Ethernet lack a rail, eight and one do not.
    """
    board = {device.name: device.board for device in ports.devices}
    layers: dict[str, set[str]] = {}
    for other in port_list:
        if board[other.device] == board[port.device]:
            layers.setdefault(other.link_layer, set()).add(_card(other, ports))
    usual = max(layers, key=lambda layer: len(layers[layer]))
    rails, cards = len(layers[usual]), len(set().union(*layers.values()))
    if not board[port.device] or port.link_layer == usual or cards not in (RAILS, 2 * RAILS, 4 * RAILS):
        return None
    if 2 * rails <= cards or _card(port, ports) in layers[usual]:
        return None
    return f"link layer {port.link_layer}, where {rails} of {cards} equal adapters are {usual}"


def _interfaces(port: _rdma_devices.Port, ports: Ports) -> tuple[str, ...]:
    return next(device.interfaces for device in ports.devices if device.name == port.device)


def _usual_rate(
    port: _rdma_devices.Port, devices: tuple[_rdma_devices.Device, ...], port_list: list[_rdma_devices.Port]
) -> tuple[float | None, bool]:
    """Rate of most ports with the same board and link layer, and whether most have it: of halves, the faster one."""
    board = {device.name: device.board for device in devices}
    rates = Counter(
        other.rate_gbps
        for other in port_list
        if other.up
        and other.rate_gbps
        and other.link_layer == port.link_layer
        and board[other.device] == board[port.device]
    )
    most = max((rate for rate, count in rates.items() if 2 * count >= rates.total()), default=None)
    if most is None or rates.total() < 3:
        return None, False
    return most, 2 * rates[most] > rates.total()


def _second(port: _rdma_devices.Port, answer: ibstat.Ibstat | None) -> ibstat.Port | None:
    for adapter in answer.adapters if answer else ():
        if adapter.name == port.device:
            return next((other for other in adapter.ports if other.number == port.number), None)
    return None


def _take_lower_rate(port: _rdma_devices.Port, answer: ibstat.Ibstat | None) -> _rdma_devices.Port:
    """The port with the lower rate of /sys and ibstat, which prints whole Gb/s."""
    second = _second(port, answer)
    if port.rate_gbps is None or second is None or second.rate_gbps is None:
        return port
    return replace(port, rate_gbps=second.rate_gbps) if second.rate_gbps < int(port.rate_gbps) else port


def _contradiction(port: _rdma_devices.Port, ports: Ports) -> str | None:
    """Rate or link layer of which /sys and ibstat report different values; None: they agree, or ibstat is absent."""
    second = _second(port, ports.second)
    first = next(other for other in _rdma_devices.ports(ports.devices) if other.name == port.name)
    if second is None or second.rate_gbps is None or first.rate_gbps is None:
        return None
    if int(first.rate_gbps) != int(second.rate_gbps):
        return f"{first.rate_gbps:g} Gb/s in /sys, but {second.rate_gbps:g} for ibstat"
    if second.link_layer != first.link_layer:
        return f"link layer {first.link_layer} in /sys, but {second.link_layer} for ibstat"
    return None


def _run_ibstat(host: Host, port_list: list[_rdma_devices.Port]) -> tuple[ibstat.Ibstat | None, str | None]:
    try:
        result = host.run("ibstat")
    except CommandMissing:
        return None, None
    try:
        answer = ibstat.parse(result.stdout + result.stderr)
    except ParseError as error:
        return None, str(error)
    listed = {(adapter.name, port.number) for adapter in answer.adapters for port in adapter.ports}
    absent = [
        port.name for port in port_list if port.link_layer == "InfiniBand" and (port.device, port.number) not in listed
    ]
    problems = [*answer.errors, *answer.faults, *(f"it does not list {name}" for name in absent)] or (
        [f"it ended with {result.exit_code}"] if result.exit_code else []
    )
    return answer, "; ".join(problems[:3]) or None


def _switched_off(host: Host, device: _rdma_devices.Device) -> bool:
    """Whether it has interfaces here and each is administratively down, so that no link is intended."""
    flags = [system_files.read_number(host, f"/sys/class/net/{name}/flags", base=16) for name in device.interfaces]
    return bool(flags) and not any(flag & 1 for flag in flags)  # IFF_UP


def _some(addresses: tuple[str, ...]) -> str:
    return ", ".join(addresses)[:120]
