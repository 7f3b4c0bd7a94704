"""Every EFA device is there, up, and offered by libfabric. One that is not makes NCCL fall back to TCP, or hang.

A container sees the adapters of its node in /sys also where it was given none of them, or only some: those it was not
given are no fault of the node, and warn where nothing says that they are wanted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from trainmaster.checks import system_files
from trainmaster.checks.comparison import adapters
from trainmaster.checks.contract import VERDICT
from trainmaster.checks.fabric import _rdma_devices
from trainmaster.core.errors import CommandMissing, HostError
from trainmaster.core.expect import Expect, implies_efa
from trainmaster.core.results import UNSEEN, Finding, error, fail, ok, skip, warn
from trainmaster.node.host import Host
from trainmaster.node.parse import ParseError, fi_info

LEVEL = 1
GPU = False
EXPECTS = ("efa_devices",)
COMPARES = (adapters("device_count", "EFA devices"),)
METRICS = {
    "summary.test_results.efa_network": VERDICT,
    "network.efa_available": VERDICT,
    "network.efa_providers": "devices",
}
VERBS = "/sys/class/infiniband_verbs"
# Amazon's installer uses a folder that is on PATH only in a login shell.
TOOLS = ("fi_info", "/opt/amazon/efa/bin/fi_info")


@dataclass(frozen=True, slots=True, kw_only=True)
class Efa:
    on_bus: tuple[str, ...]  # PCI addresses of EFA devices
    devices: tuple[_rdma_devices.Device, ...]  # those with a driver
    unknown: tuple[_rdma_devices.Device, ...] = ()  # RDMA devices whose driver cannot be read: they may be EFA's
    bus_trouble: str | None = None  # why the bus is unknown
    closed: frozenset[str] = frozenset()  # devices that this container was not given
    hidden: int = 0  # devices on the bus with a driver, of which this container is shown no RDMA device
    answer: fi_info.FiInfo | None
    trouble: str | None  # why there is no answer of fi_info


def read(host: Host) -> Efa:
    answer, trouble = _run_fi_info(host)
    every = _rdma_devices.read(host)
    on_bus: tuple[str, ...] = ()
    bus_trouble = None
    try:
        found = system_files.read_pci(host, system_files.AMAZON, kind="0x02")
        on_bus = tuple(address for address in found if _device_id(host, address).startswith("0xefa"))
    except HostError as failure:
        bus_trouble = str(failure)
    devices = tuple(device for device in every if device.efa)
    return Efa(
        closed=_find_closed(host) & {device.name for device in devices},
        hidden=sum(_has_driver(host, address) for address in on_bus) if not every else 0,
        on_bus=on_bus,
        bus_trouble=bus_trouble,
        devices=devices,
        unknown=tuple(device for device in every if device.unknown),
        answer=answer,
        trouble=trouble,
    )


def _find_closed(host: Host) -> frozenset[str]:
    """RDMA devices for which the kernel has a file and /dev has none: outside a container it makes both."""
    try:
        files = system_files.list_optional(host, "/dev/infiniband") or ()
        verbs = [entry for entry in system_files.list_optional(host, VERBS) or () if entry.startswith("uverbs")]
        return frozenset(host.read(f"{VERBS}/{entry}/ibdev").strip() for entry in verbs if entry not in files)
    except HostError:
        return frozenset()  # then they are judged as any other


def _has_driver(host: Host, address: str) -> bool:
    """Whether the driver is bound: its RDMA device is then in another namespace (rdma system, netns exclusive)."""
    try:
        return re.search(r"^DRIVER=efa$", host.read(f"{system_files.PCI}/{address}/uevent"), re.MULTILINE) is not None
    except HostError:
        return False


def _device_id(host: Host, address: str) -> str:
    text = host.read(f"{system_files.PCI}/{address}/device").strip()
    if not re.fullmatch(r"0x[0-9a-f]{4}", text, re.IGNORECASE):
        raise HostError(f"the PCI device at {address} has the ID {text[:20]!r}")
    return text


def judge(efa: Efa, expect: Expect) -> list[Finding]:
    if expect.efa_devices == 0:
        return [skip("the profile expects no EFA", proof="efa_devices=0 is stated")]
    there = max(len(efa.on_bus), len(efa.devices))
    wanted = there if expect.efa_devices is None else expect.efa_devices
    implied = implies_efa(expect)
    unread = _rdma_devices.judge_troubles((*efa.devices, *efa.unknown))
    if efa.bus_trouble is not None:
        unread.append(error(f"EFA devices on the PCI bus are unknown: {efa.bus_trouble}", action="read it by hand"))
    if not wanted and unread:
        return unread
    if not wanted and implied:
        reason = f"there is no EFA device, but {implied[0]} is expected"
        return [fail(reason, action="use a node with EFA, or give the container its EFA devices")]
    if not wanted:
        return [skip("no EFA device here and none expected", proof="the PCI bus and /sys/class/infiniband show none")]
    given = [device for device in efa.devices if device.name not in efa.closed]
    if not implied and not given and not unread and (efa.closed or (efa.hidden and efa.hidden == len(efa.on_bus))):
        return [_judge_ungiven(efa, there)]
    if efa.devices and not efa.on_bus and efa.bus_trouble is None:
        return [error("EFA devices are not on the PCI bus", action="read /sys/bus/pci/devices by hand")]
    names = [device.name for device in efa.devices]
    offered = list(efa.answer.devices("efa")) if efa.answer else None
    values: dict[str, Any] = {"expected": wanted, "on_bus": len(efa.on_bus), "devices": names, "offered": offered}
    findings = []
    if len(names) + len(efa.unknown) < wanted:
        findings.append(_judge_few(efa, wanted, values))
    findings += [found for device in efa.devices if (found := _judge_down(device, efa.devices)) is not None]
    findings += unread
    findings += _judge_rates(efa)
    if names or len(efa.on_bus) >= wanted:
        wished = names if implied else [device.name for device in given]
        findings += _judge_provider(efa, wished, values)
    return findings or [ok(f"{len(names)} devices, all offered by libfabric's efa provider", **values)]


def _judge_ungiven(efa: Efa, there: int) -> Finding:
    """Warning of a container that was given none of its node's devices: whether they work is not seen."""
    shown = "no file in /dev/infiniband opens them" if efa.closed else "their RDMA devices are in another namespace"
    reason = f"this container was given none of the {there} EFA devices of its node ({shown}): NCCL uses TCP"
    action = (
        "ask for vpc.amazonaws.com/efa if ranks of several nodes work together; efa_devices=0 says that none is meant"
    )
    values: dict[str, Any] = {UNSEEN: ["EFA devices"], "on_bus": len(efa.on_bus)}
    return warn(reason, action=action, **values)


def _judge_few(efa: Efa, wanted: int, values: dict[str, Any]) -> Finding:
    names = [device.name for device in efa.devices]
    summary = f"{len(names)} of {wanted} EFA devices"
    if len(efa.on_bus) > len(names):
        reason = f"{summary}: the bus shows {len(efa.on_bus)}, and the rest have no driver"
        return fail(reason, action="load it (`modprobe efa`) and see dmesg for the device it refuses", **values)
    shown = f": there are {', '.join(names)}" if names else ": there is none"
    action = "launch the instance with all its EFA interfaces, or give the pod all of vpc.amazonaws.com/efa"
    return fail(summary + shown, action=action, **values)


def _judge_down(device: _rdma_devices.Device, devices: tuple[_rdma_devices.Device, ...]) -> Finding | None:
    """Fault of a device whose port is down or cannot be read; None: it is up."""
    down = [port for port in device.ports if port.readable and not port.up]
    unread = next((port for port in device.ports if port.trouble is not None), None)
    if unread is not None and not down:
        return _rdma_devices.judge_port_trouble(unread, devices, name=device.name)
    if all(port.up for port in device.ports):
        return None
    if device.ports and not down:
        action = f"read {device.ports[0].folder} by hand"
        return error("its state cannot be read", action=action, device=device.name)
    states = ", ".join(f"{port.state} and {port.physical_state}" for port in device.ports) or "no port"
    return fail(f"{states}, not ACTIVE and LinkUp", action="stop and start the instance", device=device.name)


def _judge_rates(efa: Efa) -> list[Finding]:
    """A device whose rate or width cannot be read, where others show theirs."""
    silent = [device for device in efa.devices if any(None in (port.rate_gbps, port.lanes) for port in device.ports)]
    if len(silent) == len(efa.devices):
        return []
    action = "read its /sys/class/infiniband/*/ports/*/rate by hand"
    return [
        error("its rate cannot be read; other EFA devices show theirs", action=action, device=device.name)
        for device in silent
    ]


def _judge_provider(efa: Efa, names: list[str], values: dict[str, Any]) -> list[Finding]:
    """Whether libfabric offers them. Without its answer the devices cannot be called usable."""
    if efa.answer is None:
        action = "install the EFA installer's libfabric, or put fi_info on PATH"
        return [error(f"{efa.trouble}: whether libfabric offers EFA is unknown", action=action, **values)]
    if efa.answer.error is not None:
        code = efa.answer.error
        reason = f"fi_info -p efa gives {code} ({efa.answer.error_text})"
        if code == fi_info.NO_DATA:
            reason += ": libfabric has no EFA provider, or may not open the devices"
        action = "install the EFA installer's libfabric, and give the container /dev/infiniband"
        return [fail(reason, action=action, code=code, **values)]
    if efa.answer.faults:
        action = "run `fi_info -p efa` by hand"
        return [error(f"fi_info cannot be understood: {efa.answer.faults[0]}", action=action, **values)]
    offered = set(efa.answer.devices("efa"))
    return [
        fail(
            "libfabric does not offer it",
            action=f"see `fi_info -p efa -d {name}-rdm`; if it stays away, stop and start the instance",
            device=name,
        )
        for name in names
        if name not in offered
    ]


def _run_fi_info(host: Host) -> tuple[fi_info.FiInfo | None, str | None]:
    for tool in TOOLS:
        try:
            result = host.run(tool, "-p", "efa")
        except CommandMissing:
            continue
        try:
            return fi_info.parse(result.stdout + result.stderr), None
        except ParseError as error:
            return None, f"fi_info ended with {result.exit_code}, {error}"
    return None, "fi_info is not installed"
