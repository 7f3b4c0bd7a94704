"""Every InfiniBand or RoCE port is up, at its rate, on its link layer. A dead port slows every collective on its rail.

Sources: /sys, and ibstat where it is installed and a port is InfiniBand. A port is up only if both agree; of two rates
the lower counts, and a rate or link layer of which they differ is an error. The state of a port is in
/sys/class/infiniband also where its network interface is down or in another namespace. On a node with GPUs, four equal
adapters are rails: each must have a link, stated or not.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from trainmaster.checks import system_files
from trainmaster.checks.comparison import adapters, hardware
from trainmaster.checks.fabric import _adapters, _rdma_devices, _roles
from trainmaster.checks.fabric._rails import LEAST, Rails
from trainmaster.core.errors import CommandMissing, HostError
from trainmaster.core.expect import Expect, implies_rdma
from trainmaster.core.results import WEIGHT, Finding, Verdict, error, fail, ok, skip, warn
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
_CABLE = "reseat or replace its cable or transceiver, see the switch port, then rerun"
_STATE = "state ib_ports=N, the number of ports that must be up, if this one is meant to be down"
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
    roles: _roles.Roles = field(default_factory=_roles.Roles)
    bus_trouble: str | None = None  # why the adapters on the PCI bus are unknown

    @property
    def listed(self) -> list[_rdma_devices.Port]:
        """Ports of the fabric. Those that manage NVSwitches are none, and cannot stand for a rail that is missing."""
        return [port for port in _rdma_devices.ports(self.devices) if port.device not in self.roles.bridges]


def read(host: Host) -> Ports:
    devices = _rdma_devices.read(host)
    roles = _roles.read(host, devices)
    bus, bus_trouble = _adapters.Adapters(), None
    try:
        bus = _adapters.read(host, devices)
    except HostError as failure:
        bus_trouble = str(failure)
    second, trouble = None, None
    port_list = _rdma_devices.ports(devices)
    # A RoCE node may do without the module that ibstat needs.
    if any(port.link_layer == "InfiniBand" for port in port_list):
        second, trouble = _run_ibstat(host, [port for port in port_list if port.device not in roles.bridges])
    return Ports(
        devices=devices,
        adapters=bus,
        bus_trouble=bus_trouble,
        gpus=system_files.has_gpus(host),
        idle=frozenset(device.name for device in devices if _switched_off(host, device)),
        second=second,
        trouble=trouble,
        roles=roles,
    )


def judge(ports: Ports, expect: Expect) -> list[Finding]:
    port_list = [_take_lower_rate(port, ports.second) for port in ports.listed]
    if expect.ib_ports == 0 and (implied := implies_rdma(expect)):
        action = "state the number of ports, or leave the other expectation out"
        return [error(f"ib_ports=0 and {implied[0]} are expected: both cannot hold", action=action)]
    if expect.ib_ports == 0:
        return [skip("the profile expects no InfiniBand port", proof="ib_ports=0 is stated")]
    stated = expect.ib_ports is not None or expect.ib_rate_gbps is not None or expect.ib_link_layer is not None
    stated = stated or expect.transport == "IB"
    findings = _judge_ports(ports, port_list, expect, stated=stated) if port_list else []
    findings += _rdma_devices.judge_troubles(tuple(device for device in ports.devices if not device.efa))
    findings += _judge_adapters(ports, stated=stated)
    if ports.bus_trouble is not None:
        action = f"read {system_files.PCI} by hand"
        findings.append(error(f"adapters without an RDMA device are unknown: {ports.bus_trouble}", action=action))
    if ports.trouble is not None:
        action = "run `ibstat` by hand; load ib_umad, and give the container /dev/infiniband"
        findings.append(error(f"ibstat cannot confirm the ports: {ports.trouble}", action=action))
    if not port_list and stated:
        reason = f"0 of {expect.ib_ports or 'the expected'} ports: there is no InfiniBand or RoCE device"
        action = "use a node with that fabric, or give the container its RDMA devices"
        findings.insert(0, fail(reason, action=action))
    for name, proof in ports.roles.bridges.items():
        findings.append(skip("it manages NVSwitches, and is no port of the fabric", proof=proof, device=name))
    if not findings:
        proof = "/sys/class/infiniband and the PCI bus show no InfiniBand or RoCE device"
        return [skip("no InfiniBand or RoCE device here and none expected", proof=proof)]
    return findings


def _judge_ports(ports: Ports, port_list: list[_rdma_devices.Port], expect: Expect, *, stated: bool) -> list[Finding]:
    rails = Rails(
        devices=ports.devices,
        ports=tuple(port_list),
        lit=frozenset(port.name for port in port_list if _is_up(port, ports)),
        aside=frozenset(ports.roles.routed),
    )
    faults = {port.name: why for port in port_list if (why := _find_fault(port, ports, expect, rails))}
    fit = len(port_list) - len(faults)
    values: dict[str, Any] = {"ports": len(port_list), "fit": fit, "up": sum(port.up for port in port_list)}
    findings = [_judge_port(port, faults.get(port.name), ports, rails, stated=stated) for port in port_list]
    meant = _find_meant(rails, expect.ib_ports)
    lacking = [name for name in faults if name in meant]
    if expect.ib_ports is not None and fit >= expect.ib_ports and not lacking:
        # More ports than expected (storage, spares): those that do not fit are listed and are no fault.
        proof = f"{fit} of {expect.ib_ports} expected ports are up without it"
        unread = [finding for port, finding in zip(port_list, findings, strict=True) if port.trouble is not None]
        named = {finding.device for finding in unread}
        spare = [
            skip(f"{why}; not one of those expected", proof=proof, device=name)
            for name, why in faults.items()
            if name not in named
        ]
        return [ok(f"{fit} of {expect.ib_ports} expected ports are up", **values), *unread, *spare]
    if expect.ib_ports is None:
        # The numbers of the node, for the comparison of nodes: a port that is missing has no finding of its own.
        reason = f"{values['up']} of {len(port_list)} ports are up"
        if all(finding.verdict is Verdict.SKIP for finding in findings):
            node = skip(reason, proof="no link of them is intended", **values)
        else:
            node = ok(reason, **values) if values["up"] else warn(reason, action="mend the ports named here", **values)
        findings.insert(0, node)
    else:
        kept = len(meant) - len(lacking) if lacking else fit
        reason = f"{kept} of {expect.ib_ports} ports fit: {', '.join(lacking or faults) or 'the rest are not there'}"
        absent = expect.ib_ports - len(port_list)
        unknown = sum(finding.verdict is Verdict.ERROR and finding.device in faults for finding in findings)
        unknown += sum(bool(device.troubles) and not device.ports for device in ports.devices)
        if unknown and kept + unknown >= expect.ib_ports:
            # Whether they fit is not known; a port that was measured and does not fit leaves too few.
            findings.insert(0, error(reason, action="see the ports that cannot be read", **values))
            return findings
        action = f"find the {absent} ports that are not there" if absent > 0 else "mend the ports named here"
        findings.insert(0, fail(reason, action=action, **values))
    return findings


def _find_meant(rails: Rails, expected: int | None) -> frozenset[str]:
    """Names of the ports that are meant, where equal adapters are exactly as many as expected: a storage port that is
    up does not stand for a rail that is down."""
    for port in rails.ports:
        equal = rails.equal(port)
        if expected is not None and expected >= LEAST and len(equal) == expected and rails.board(port):
            return frozenset(other.name for other in equal)
    return frozenset()


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
    if on_bus.alone and (stated or (ports.gpus and len(on_bus.alone) >= LEAST)):
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


def _find_fault(port: _rdma_devices.Port, ports: Ports, expect: Expect, rails: Rails) -> str | None:
    """Fault of a port as a sentence; None if it fits."""
    if port.trouble is not None and not port.readable:
        return port.trouble.reason
    if expect.ib_link_layer is not None and port.link_layer != expect.ib_link_layer:
        return f"link layer {port.link_layer}, not {expect.ib_link_layer}"
    if expect.ib_link_layer is None and (odd := rails.odd_layer(port)):
        return odd
    if not port.up and ports.gpus and rails.is_rail(port):
        count, lit = rails.count(port)
        state = f"{port.state or 'no state'} and {port.physical_state or 'no physical state'}"
        return f"{state}, where {lit} of {count} equal adapters have a link"
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
    usual = rails.usual_rate(port)[0] if least is None else None
    if usual is not None and port.rate_gbps < usual:
        return f"{port.rate_gbps:g} Gb/s, where other ports of this board run at {usual:g}"
    if least is None and port.link_layer == "InfiniBand" and port.lanes == 1:
        return f"{port.rate_gbps:g} Gb/s over one lane (1X)"  # Ethernet has ports of one lane, InfiniBand has none
    return _contradiction(port, ports)  # not fit, and judged as an error


def _judge_port(port: _rdma_devices.Port, fault: str | None, ports: Ports, rails: Rails, *, stated: bool) -> Finding:
    """What was measured of a port, or what could not be read of it, whichever is worse."""
    values: dict[str, Any] = {
        "state": port.state,
        "physical_state": port.physical_state,
        "rate_gbps": port.rate_gbps,
        "link_layer": port.link_layer,
    }
    measured = _judge_measured(port, fault, ports, rails, stated=stated, values=values)
    unread = _rdma_devices.judge_port_trouble(port, ports.devices, **values)
    if unread is None or WEIGHT[measured.verdict] > WEIGHT[unread.verdict]:
        return measured
    return unread


def _judge_measured(
    port: _rdma_devices.Port, fault: str | None, ports: Ports, rails: Rails, *, stated: bool, values: dict[str, Any]
) -> Finding:
    if not port.readable:
        action = f"read {port.folder} by hand"
        return error("its state or link layer cannot be read", action=action, device=port.name, **values)
    if port.up and port.rate_gbps is None:
        return error("up, but its rate cannot be read", action=f"read {port.folder}/rate", device=port.name, **values)
    if fault is None and port.lanes is None and any(other.lanes is not None for other in rails.ports):
        reason = "up, but its width cannot be read; other ports show theirs"
        return error(reason, action=f"read {port.folder}/rate", device=port.name, **values)
    if fault is None:
        return ok(f"up, {port.rate_gbps:g} Gb/s, {port.link_layer}", device=port.name, **values)
    contradiction = _contradiction(port, ports)
    if fault == contradiction:
        action = "run `ibstat` and read /sys again; see the counters of the port, and reset it if they still differ"
        return error(fault, action=action, device=port.name, **values)
    linked = port.name in rails.lit
    rail = ports.gpus and ((not linked and rails.is_rail(port)) or rails.odd_layer(port) is not None)
    # A training node with adapters of which none has a link is no node of a cluster.
    dark = ports.gpus and not rails.lit and port.link_layer == "InfiniBand"
    proof = None if stated or rail or dark or port.up else _find_unmeant(port, ports, rails)
    if proof is not None:
        return skip(f"{fault}: no link is intended", proof=proof, device=port.name, **values)
    usual, certain = rails.usual_rate(port)
    slow = port.up and certain and usual is not None and (port.rate_gbps or 0) < usual
    rail = rail or (slow and ports.gpus and rails.count(port)[0] >= LEAST)
    action = _ACTIONS.get(port.physical_state or "") or _ACTIONS.get(port.state or "") or _CABLE
    if "link layer" in fault:
        action = "set the port's type with `mlxconfig set LINK_TYPE_P1=1` (InfiniBand) or 2 (Ethernet), then reboot"
    fault += f" ({contradiction})" if port.up and contradiction else ""
    if stated or rail or dark:
        return fail(fault, action=action, device=port.name, **values)
    return warn(fault, action=action if port.up else f"{action}; {_STATE}", device=port.name, **values)


def _find_unmeant(port: _rdma_devices.Port, ports: Ports, rails: Rails) -> str | None:
    """What shows that a port without a link needs none; None: nothing does."""
    off = port.device in ports.idle or (not rails.device(port).interfaces and port.physical_state == "Disabled")
    if port.link_layer == "Ethernet" and off and (rails.lit or not ports.gpus):
        return "its network interface is switched off" if port.device in ports.idle else "the port is Disabled"
    never = ports.roles.unused.get(port.name)
    if never is None or not rails.lit:
        return None
    if rails.has_link(port):
        return f"another port of its card has a link, and this one never had one: {never}"
    distant = ports.roles.distant.get(port.device)
    return f"{distant}, and it never had a link: {never}" if distant is not None else None


def _is_up(port: _rdma_devices.Port, ports: Ports) -> bool:
    second = _second(port, ports.second)
    return port.up and (second is None or second.up)


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
    try:
        flags = [system_files.read_number(host, f"/sys/class/net/{name}/flags", base=16) for name in device.interfaces]
    except HostError:
        return False  # then a port without a link is told
    return bool(flags) and not any(flag & 1 for flag in flags)  # IFF_UP


def _some(addresses: tuple[str, ...]) -> str:
    return ", ".join(addresses)[:120]
