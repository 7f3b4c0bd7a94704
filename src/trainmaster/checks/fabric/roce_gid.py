"""Every RoCE port that is up has a routable address (a RoCE v2 GID). Without one its connections time out.

The GID table has 256 entries, of which the first few are in use; the first sixteen are read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from trainmaster.checks import system_files
from trainmaster.checks.fabric import _rdma_devices, _trouble
from trainmaster.core.errors import FileUnreadable, HostError, NotCaptured
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok, skip, warn
from trainmaster.node.host import Host

LEVEL = 1
GPU = False
EXPECTS = ()
COMPARES = ()
METRICS: dict[str, str] = {}
PLACES = 16
INDEX_VARIABLE = "NCCL_IB_GID_INDEX"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid:
    index: int
    address: str
    kind: str | None  # "RoCE v2", "IB/RoCE v1"; None: not reported by the kernel

    @property
    def local(self) -> bool:
        return self.address.startswith("fe80:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gids:
    table: dict[str, tuple[Gid, ...]]  # port → what is in use
    index: str | None  # NCCL_IB_GID_INDEX
    refused: dict[str, _trouble.Trouble] = field(default_factory=dict)  # ports whose table cannot be read
    devices: tuple[_rdma_devices.Device, ...] = ()


def read(host: Host) -> Gids:
    devices = tuple(device for device in _rdma_devices.read(host) if not device.efa)
    table: dict[str, tuple[Gid, ...]] = {}
    refused: dict[str, _trouble.Trouble] = {}
    for port in _rdma_devices.ports(devices):
        if port.link_layer != "Ethernet" or not port.up:
            continue
        try:
            table[port.name] = _table(host, port)
        except HostError as failure:
            refused[port.name] = _trouble.of(f"{port.folder}/gids", failure)
    return Gids(table=table, index=host.env(INDEX_VARIABLE), refused=refused, devices=devices)


def judge(gids: Gids, expect: Expect) -> list[Finding]:  # noqa: ARG001 (the need of a port does not depend on the profile)
    unread = _judge_unread(gids)
    if not gids.table and unread:
        return unread
    if not gids.table:
        return [
            skip("no RoCE port is up here", proof="/sys/class/infiniband has no active port of link layer Ethernet")
        ]
    return [*(_judge_port(name, table, gids.index) for name, table in gids.table.items()), *unread]


def _judge_unread(gids: Gids) -> list[Finding]:
    """Findings about ports that may be RoCE ports, and whose state or table cannot be read."""
    found = []
    for port in _rdma_devices.ports(gids.devices):
        trouble = _rdma_devices.judge_port_trouble(port, gids.devices)
        if port.name in gids.refused:
            found.append(_trouble.judge(gids.refused[port.name], device=port.name, answering=len(gids.table)))
        elif trouble is not None and port.link_layer not in ("InfiniBand", "Unspecified"):
            found.append(trouble)
        elif trouble is None and not port.readable:
            action = "read its files in /sys/class/infiniband by hand"
            found.append(error("its state cannot be read", action=action, device=port.name))
    shut = {device.name for device in gids.devices if not device.ports}
    return found + [finding for finding in _rdma_devices.judge_troubles(gids.devices) if finding.device in shut]


def _judge_port(name: str, table: tuple[Gid, ...], index: str | None) -> Finding:
    values: dict[str, Any] = {"gids": {str(gid.index): f"{gid.address} {gid.kind}" for gid in table}}
    second = [gid for gid in table if gid.kind == "RoCE v2"]
    if not second:
        reason = "it has no RoCE v2 GID" if table else "it has no GID at all"
        return fail(reason, action="give its interface an IP address and set it up", device=name, **values)
    if index is not None and index != "-1":
        chosen = next((gid for gid in table if str(gid.index) == index), None)
        if chosen is None or chosen.kind != "RoCE v2":
            what = f"is {chosen.kind}" if chosen else "is empty"
            reason = f"{INDEX_VARIABLE}={index} {what} on this port; RoCE v2 is at {second[0].index}"
            return fail(reason, action=f"unset {INDEX_VARIABLE}: NCCL 2.21 and later choose it", device=name, **values)
    routable = [gid for gid in second if not gid.local]
    if not routable:
        reason = f"its only RoCE v2 GIDs are link-local ({second[0].address}): no router will carry it"
        return warn(reason, action="give its interface an IP address", device=name, **values)
    return ok(f"RoCE v2 at {routable[0].index}: {routable[0].address}", device=name, **values)


def _table(host: Host, port: _rdma_devices.Port) -> tuple[Gid, ...]:
    gids = []
    for index in range(PLACES):
        shown = system_files.read_optional(host, f"{port.folder}/gids/{index}")
        text = (shown or "").strip()
        if shown is not None and not re.fullmatch(r"(?:[0-9a-f]{4}:){7}[0-9a-f]{4}", text, re.IGNORECASE):
            raise HostError(f"GID {index} of {port.name} is {text[:40]!r}")
        if text.replace(":", "").strip("0"):  # an empty entry is all zeros
            gids.append(Gid(index=index, address=text, kind=_kind(host, port, index)))
    return tuple(gids)


def _kind(host: Host, port: _rdma_devices.Port, index: int) -> str | None:
    try:
        kind = host.read(f"{port.folder}/gid_attrs/types/{index}").strip()
    except NotCaptured:
        raise
    except FileUnreadable:
        return None  # the entry was removed between the two reads
    if kind not in ("RoCE v2", "IB/RoCE v1", "RoCE v1"):
        raise HostError(f"the type of GID {index} of {port.name} is {kind[:40]!r}")
    return kind
