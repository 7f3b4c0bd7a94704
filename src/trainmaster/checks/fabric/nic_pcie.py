"""Each network adapter has all its PCIe lanes at full speed. Eight lanes of generation 3 carry 63 of 400 Gb/s.

An adapter is compared with its own capability and with the equal adapters of the node (PCI device id and board). The
kernel shows the link of a device in current_link_width, current_link_speed, max_link_width and max_link_speed
(Documentation/ABI/testing/sysfs-bus-pci; drivers/pci/pci-sysfs.c). An adapter does not lower its link when it is idle.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from trainmaster.checks import system_files
from trainmaster.checks.comparison import hardware
from trainmaster.checks.fabric import _rdma_devices, _roles, _trouble
from trainmaster.core.errors import FileMissing, HostError, NotCaptured
from trainmaster.core.expect import Expect, implies_rdma
from trainmaster.core.results import Finding, error, fail, ok, skip, warn
from trainmaster.node.host import Host

LEVEL = 1
GPU = False
EXPECTS = ()
_SEAT = "reseat the adapter or its riser, and see the PCIe setting of its slot; power-cycle the node, then test again"
COMPARES = (
    hardware("width", "PCIe lanes of the network adapters", _SEAT),
    hardware("speed_gts", "PCIe speed of the network adapters", _SEAT, unit="GT/s"),
)
METRICS: dict[str, str] = {}
FILES = ("current_link_width", "max_link_width", "current_link_speed", "max_link_speed")
# Payload of a lane for one GT/s: 8b/10b encoding up to generation 2, 128b/130b from generation 3 on (PCIe base
# specification); generation 6 has flits with about the same loss.
_CODED_GTS = 5.0
LEAST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """PCIe link of an adapter. None: the kernel does not show it (0 lanes, Unknown)."""

    width: int | None
    max_width: int | None
    speed_gts: float | None
    max_speed_gts: float | None

    @property
    def shown(self) -> bool:
        return None not in (self.width, self.max_width, self.speed_gts, self.max_speed_gts)

    @property
    def gbps(self) -> float:
        """What it carries each way, before the headers of packets."""
        gts = self.speed_gts or 0.0
        return (self.width or 0) * gts * (0.8 if gts <= _CODED_GTS else 128 / 130)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """RDMA device with its link, or why there is none."""

    device: _rdma_devices.Device
    model: str | None  # PCI device id
    link: Link | None = None
    trouble: _trouble.Trouble | None = None
    missing: bool = False  # the device has no such files
    captured: bool = True  # False: a capture of a version that did not read them
    exempt: str | None = None  # proof that it has no link of its own
    aside: bool = False  # it carries the default route: no rail, and in a slot of its own

    @property
    def rate_gbps(self) -> float:
        """Rate of its fastest port that is up."""
        return max((port.rate_gbps or 0.0 for port in self.device.ports if port.up), default=0.0)


def read(host: Host) -> tuple[Adapter, ...]:
    devices = tuple(device for device in _rdma_devices.read(host) if not device.efa)
    bridges, routed = _roles.find_bridges(host, devices), _roles.find_routed(host, devices)
    adapters = [_read_adapter(host, device, bridges.get(device.name)) for device in devices]
    return tuple(replace(adapter, aside=adapter.device.name in routed) for adapter in adapters)


def judge(adapters: tuple[Adapter, ...], expect: Expect) -> list[Finding]:
    if not adapters and implies_rdma(expect):
        return [error("there is no adapter whose PCIe link could be read", action="see ib_ports")]
    if not adapters:
        return [skip("no InfiniBand or RoCE device here", proof="/sys/class/infiniband shows none but EFA's")]
    linked = [adapter for adapter in adapters if adapter.exempt is None]
    if linked and not any(adapter.captured for adapter in linked):
        proof = f"the capture holds no {FILES[0]} of {len(linked)} adapters: an earlier version made it"
        return [skip("the PCIe links of the adapters were not captured", proof=proof)]
    return [_judge_one(adapter, adapters) for adapter in adapters]


def _judge_one(adapter: Adapter, adapters: tuple[Adapter, ...]) -> Finding:
    name, link = adapter.device.name, adapter.link
    if adapter.exempt is not None:
        return skip("it has no PCIe link of the fabric", proof=adapter.exempt, device=name)
    equal = [other for other in adapters if _group(other) == _group(adapter) and (other is adapter or not other.aside)]
    if adapter.trouble is not None:
        answering = sum(other.link is not None for other in adapters)
        return _trouble.judge(adapter.trouble, device=name, answering=answering)
    if link is None or not link.shown:
        return _judge_unshown(adapter, adapters)
    values: dict[str, Any] = {
        "width": link.width,
        "max_width": link.max_width,
        "speed_gts": link.speed_gts,
        "max_speed_gts": link.max_speed_gts,
    }
    width, speed = link.width or 0, link.speed_gts or 0.0
    shown = f"{width} lanes at {speed:g} GT/s"
    links = [other.link for other in equal if other.link is not None and other.link.shown]
    most_width, most_speed = _usual([one.width or 0 for one in links]), _usual([one.speed_gts or 0.0 for one in links])
    if not adapter.aside and (width < most_width or speed < most_speed):
        reason = f"its PCIe link has {shown}, where equal adapters have {most_width:g} lanes at {most_speed:g} GT/s"
        # Of two, one may be in a slot that was chosen for it.
        return (fail if len(links) > LEAST else warn)(reason, action=_SEAT, device=name, **values)
    most = f"{link.max_width} lanes at {link.max_speed_gts:g} GT/s"
    if width > (link.max_width or 0) or speed > (link.max_speed_gts or 0):
        reason = f"it reports a PCIe link of {shown}, and can have {most}"
        return error(reason, action="read it with `lspci -vv`; power-cycle the node", device=name, **values)
    lower = width < (link.max_width or 0) or speed < (link.max_speed_gts or 0)
    if lower and link.gbps < adapter.rate_gbps:
        # Some slots have fewer lanes than their adapter; it matters where the port is faster than the link.
        reason = f"its PCIe link has {shown} of {most}: {link.gbps:.0f} Gb/s for a port of {adapter.rate_gbps:g}"
        return warn(reason, action=_SEAT, device=name, **values)
    return ok(f"{shown}, of {most}", device=name, **values)


def _judge_unshown(adapter: Adapter, adapters: tuple[Adapter, ...]) -> Finding:
    """An adapter whose link is not shown: none is on a virtual or old machine, one of several is an error."""
    name = adapter.device.name
    showing = sum(other.link is not None and other.link.shown for other in adapters if _group(other) == _group(adapter))
    what = "is not shown" if adapter.missing else "is shown as 0 lanes or an unknown speed"
    if adapter.device.driver is None and not adapter.device.troubles:
        return skip("it is on no bus", proof=f"{_rdma_devices.FOLDER}/{name}/device does not exist", device=name)
    if showing:
        reason = f"its PCIe link {what}; {showing} equal adapters show theirs"
        return error(reason, action=f"see `lspci -vv -s {adapter.device.address}`", device=name)
    proof = f"{FILES[0]} of {name} {'does not exist' if adapter.missing else 'and its speed say nothing'}"
    return skip("its PCIe link is not shown on this machine", proof=proof, device=name)


def _group(adapter: Adapter) -> tuple[str | None, str]:
    return adapter.model, adapter.device.board


def _usual(values: list[float] | list[int]) -> float:
    """Value of most; the highest where they are divided."""
    value, count = Counter(values).most_common(1)[0]
    return value if 2 * count > len(values) else max(values)


def _read_adapter(host: Host, device: _rdma_devices.Device, bridge: str | None) -> Adapter:
    place = f"{system_files.PCI}/{device.address}/device"
    model = None if device.address is None else _roles.read_quietly(host, place)
    if bridge is not None:
        return Adapter(device=device, model=model, exempt=f"it manages NVSwitches: {bridge}")
    if _roles.is_virtual(host, device):
        proof = "a scalable function, on the auxiliary bus" if device.scalable else f"{device.address} has a physfn"
        return Adapter(device=device, model=model, exempt=f"{proof}: the link is that of its card")
    if model is not None and not re.fullmatch(r"0x[0-9a-f]{4}", model, re.IGNORECASE):
        strange = HostError(f"{place} holds no device id: {model[:20]!r}")
        return Adapter(device=device, model=model, trouble=_trouble.of(place, strange))
    try:
        texts = [_read_text(host, device, name) for name in FILES]
    except FileMissing:
        return Adapter(device=device, model=model, missing=True)
    except NotCaptured as failure:
        return Adapter(device=device, model=model, trouble=_trouble.of(FILES[0], failure), captured=False)
    except HostError as failure:
        path = f"{_rdma_devices.FOLDER}/{device.name}/device/{FILES[0]}"
        return Adapter(device=device, model=model, trouble=_trouble.of(path, failure))
    try:
        link = Link(
            width=_parse_width(texts[0]),
            max_width=_parse_width(texts[1]),
            speed_gts=_parse_speed(texts[2]),
            max_speed_gts=_parse_speed(texts[3]),
        )
    except HostError as failure:
        path = f"{_rdma_devices.FOLDER}/{device.name}/device"
        return Adapter(device=device, model=model, trouble=_trouble.of(path, failure))
    return Adapter(device=device, model=model, link=link)


def _read_text(host: Host, device: _rdma_devices.Device, name: str) -> str:
    """Text of a file of its PCI device, by the address or by the RDMA device: two ways to one folder."""
    below = f"{_rdma_devices.FOLDER}/{device.name}/device/{name}"
    if device.address is None:
        return host.read(below).strip()
    try:
        return host.read(f"{system_files.PCI}/{device.address}/{name}").strip()
    except NotCaptured:
        return host.read(below).strip()


def _parse_width(text: str) -> int | None:
    """Number of lanes; None: 0 (a function without a link), or 63 and 255, which a device off the bus shows."""
    if not re.fullmatch(r"\d{1,3}", text, re.ASCII):
        raise HostError(f"the PCIe width is {text[:20]!r}")
    return int(text) if int(text) in (1, 2, 4, 8, 12, 16, 32) else None


def _parse_speed(text: str) -> float | None:
    """GT/s, from `32.0 GT/s PCIe` (before Linux 5.7: `8 GT/s`); None: Unknown."""
    match = re.fullmatch(r"(\d{1,3}(?:\.\d)?) GT/s(?: PCIe)?", text, re.ASCII)
    if match is None and not text.startswith("Unknown"):
        raise HostError(f"the PCIe speed is {text[:20]!r}")
    return float(match[1]) if match else None
