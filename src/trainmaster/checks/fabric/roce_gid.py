"""Every RoCE port that is up has a routable address (a RoCE v2 GID). Without one its connections time out.

The GID table has 256 entries, of which the first few are in use; the first sixteen are read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from trainmaster.checks import system_files
from trainmaster.checks.fabric import _rdma_devices
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
    unread: tuple[str, ...] = ()  # ports whose state or link layer cannot be read


def read(host: Host) -> Gids:
    every = _rdma_devices.ports(_rdma_devices.read(host))
    ports = [port for port in every if port.link_layer == "Ethernet" and port.up]
    unread = tuple(port.name for port in every if not port.readable)
    table = {port.name: _table(host, port) for port in ports}
    return Gids(table=table, index=host.env(INDEX_VARIABLE), unread=unread)


def judge(gids: Gids, expect: Expect) -> list[Finding]:  # noqa: ARG001 (the need of a port does not depend on the profile)
    action = "read its files in /sys/class/infiniband by hand"
    unread = [error("its state cannot be read", action=action, device=name) for name in gids.unread]
    if not gids.table and unread:
        return unread
    if not gids.table:
        return [
            skip("no RoCE port is up here", proof="/sys/class/infiniband has no active port of link layer Ethernet")
        ]
    return [*(_judge_port(name, table, gids.index) for name, table in gids.table.items()), *unread]


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
