"""NCCL and gloo find an interface that is up and has an address, and MASTER_ADDR is behind one.

Ranks meet through it before any RDMA.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Any

from trainmaster.checks import system_files
from trainmaster.core.errors import HostError
from trainmaster.core.expect import Expect
from trainmaster.core.loopback import is_loopback_host
from trainmaster.core.results import Finding, fail, ok, skip, warn
from trainmaster.node.host import Host

LEVEL = 1
GPU = False
EXPECTS = ()
COMPARES = ()
METRICS: dict[str, str] = {}
NET = "/sys/class/net"
VARIABLE = "NCCL_SOCKET_IFNAME"
# Documentation/networking/operstates.rst
STATES = ("unknown", "notpresent", "down", "lowerlayerdown", "testing", "dormant", "up")
MASTER = "MASTER_ADDR"
# A row of /proc/net/if_inet6: address, index, length of the prefix, scope, flags, interface (net/ipv6/addrconf.c).
_SIX = re.compile(r"[0-9a-f]{32}(?: [0-9a-f]{2,8}){4} +\S+\s*")
_UP, _REJECT = 0x1, 0x200  # include/uapi/linux/route.h
# Bridges and tunnels inside one machine: no other node can reach an address on them.
_INWARD = re.compile(r"(virbr|br-|cni|flannel|cali|veth|podman|lxc|lxd|kube|tunl|vxlan|docker|dummy|ifb).*")
# Made by kernel modules in every network namespace, and never up by themselves.
_MADE = re.compile(r"(sit|gre|gretap|erspan|ip6tnl|ip6gre|ip_vti|ip6_vti|teql)\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    name: str
    index: int  # the kernel's order, in which NCCL looks
    up: bool
    addressed: bool

    @property
    def usable(self) -> bool:
        return self.up and self.addressed


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Route of IPv4."""

    interface: str
    network: ipaddress.IPv4Network


@dataclass(frozen=True, slots=True, kw_only=True)
class Interfaces:
    listed: tuple[Interface, ...]
    nccl: str | None
    gloo: str | None
    gpus: bool
    master: str | None = None  # MASTER_ADDR, where it is another machine
    routes: tuple[Route, ...] = ()


def read(host: Host) -> Interfaces:
    rows = system_files.read_routes(host)
    addressed = _addressed(host, rows)
    interfaces = []
    for name in host.list(NET):
        if name == "bonding_masters":
            continue  # a file among the folders
        flags = system_files.read_number(host, f"{NET}/{name}/flags", base=16)
        index = system_files.read_number(host, f"{NET}/{name}/ifindex")
        if index < 1:
            raise HostError(f"the index of {name} is {index}")
        shown = system_files.read_optional(host, f"{NET}/{name}/operstate")
        state = (shown or "").strip()
        if shown is not None and state not in STATES:
            raise HostError(f"the state of {name} is {state[:20]!r}")
        # Loopback and tunnels report the state unknown; administratively up is enough for them.
        up = bool(flags & 1) and state in ("up", "unknown")
        interfaces.append(Interface(name=name, index=index, up=up, addressed=name in addressed or name == "lo"))
    return Interfaces(
        listed=tuple(sorted(interfaces, key=lambda interface: interface.index)),
        nccl=host.env(VARIABLE),
        gloo=host.env("GLOO_SOCKET_IFNAME"),
        gpus=system_files.has_gpus(host),
        master=_read_master(host),
        routes=tuple(route for row in rows if (route := _parse_route(row)) is not None),
    )


def judge(interfaces: Interfaces, expect: Expect) -> list[Finding]:
    findings = [_judge_named(interfaces) if interfaces.nccl else _judge_found(interfaces, expect)]
    unreachable = _judge_master(interfaces) if interfaces.master else None
    if unreachable is not None:
        findings.append(unreachable)
    if interfaces.gloo:
        missing = set(interfaces.gloo.split(",")) - {item.name for item in interfaces.listed}
        if missing:
            reason = f"GLOO_SOCKET_IFNAME names {', '.join(sorted(missing))}; {_there(interfaces)}"
            findings.append(fail(reason, action="name an interface that is there", device="GLOO_SOCKET_IFNAME"))
    return findings


def matches(names: str, interface: str) -> bool:
    """Whether NCCL's list takes an interface: prefixes, exact after `=`, all others after `^`."""
    other, names = names.startswith("^"), names.removeprefix("^")
    exact, names = names.startswith("="), names.removeprefix("=")
    hit = any(interface == word if exact else interface.startswith(word) for word in names.split(",") if word)
    return hit != other


def _judge_named(interfaces: Interfaces) -> Finding:
    names = interfaces.nccl or ""
    taken = [item for item in interfaces.listed if matches(names, item.name)]
    action = f"name an interface that is up on every node, or unset {VARIABLE}"
    if not taken:
        reason = f"{VARIABLE}={names} fits no interface; {_there(interfaces)}"
        return fail(reason, action=action, device=VARIABLE, value=names)
    usable = [item.name for item in taken if item.usable]
    if not usable:
        state = "has no address" if taken[0].up else "is down"
        reason = f"{VARIABLE}={names} names {taken[0].name}, which {state}"
        return fail(reason, action=action, device=VARIABLE, value=names)
    return ok(f"{', '.join(usable)}, as {VARIABLE} says", interfaces=usable)


def _judge_master(interfaces: Interfaces) -> Finding | None:
    """Fault of the way to MASTER_ADDR; None: there is one. A name is resolved by the check hostname."""
    master = interfaces.master or ""
    usable = {item.name for item in interfaces.listed if item.usable and item.name != "lo"}
    if not usable:
        reason = f"{MASTER}={master} is another machine, and no interface but loopback is up and has an address"
        return fail(reason, action="bring up the network of this node", device=MASTER, value=master)
    try:
        address = ipaddress.IPv4Address(master)
    except ValueError:
        return None  # a name, or IPv6
    routes = [route for route in interfaces.routes if address in route.network]
    if not routes:
        return fail(f"there is no route to {MASTER}={master}", action="add the route", device=MASTER, value=master)
    best = max(routes, key=lambda route: route.network.prefixlen)
    if best.interface not in usable:
        reason = f"the route to {MASTER}={master} leads through {best.interface}, which is down"
        return fail(reason, action=f"bring up {best.interface}, or mend the route", device=MASTER, value=master)
    return None


def _judge_found(interfaces: Interfaces, expect: Expect) -> Finding:
    usable = [item.name for item in interfaces.listed if item.usable and item.name != "lo"]
    # NCCL prefers IP over InfiniBand, and uses Docker interfaces only if there is no other.
    usable = [name for name in usable if name.startswith("ib")] or [
        name for name in usable if not name.startswith("docker")
    ]
    inside = [item for item in interfaces.listed if _INWARD.fullmatch(item.name) or _MADE.fullmatch(item.name)]
    shut = [item for item in interfaces.listed if item.name != "lo" and item not in inside]
    if not usable and shut and (interfaces.gpus or expect.transport):
        state = ", ".join(f"{item.name} {'has no address' if item.up else 'is down'}" for item in shut[:8])
        reason = f"no other machine can be reached: {state}"
        return fail(reason, action="bring up the interface, or give it an address", device=shut[0].name)
    if not usable:
        proof = f"{len(interfaces.listed)} interfaces, none but loopback up and with an address"
        return skip("this node can only work alone", proof=proof)
    values: dict[str, Any] = {"interfaces": usable}
    outward = [name for name in usable if not _INWARD.fullmatch(name)]
    if interfaces.gpus and outward and outward[0] != usable[0]:
        reason = f"NCCL would take {usable[0]} first, which is reachable only from this machine"
        return warn(reason, action=f"set {VARIABLE}={outward[0]}", device=usable[0], **values)
    return ok(f"NCCL would use {usable[0]}", **values)


def _there(interfaces: Interfaces) -> str:
    return f"there are {', '.join(item.name for item in interfaces.listed)}"


def _read_master(host: Host) -> str | None:
    """MASTER_ADDR, if it names another machine."""
    master = (host.env(MASTER) or "").strip()
    if not master or is_loopback_host(master):
        return None
    return None if master.partition(".")[0] == host.hostname().partition(".")[0] else master


def _parse_route(row: str) -> Route | None:
    """Route of a row; None: it is not in use or rejects. Addresses are hexadecimal in the order of the machine."""
    words = row.split()
    flags, mask = (words[3], words[7]) if len(words) > 7 else ("1", "00000000" if words[1] == "0" * 8 else "FFFFFFFF")
    try:
        if not int(flags, 16) & _UP or int(flags, 16) & _REJECT:
            return None
        place, bits = (ipaddress.IPv4Address(bytes.fromhex(word)[::-1]) for word in (words[1], mask))
        return Route(interface=words[0], network=ipaddress.IPv4Network(f"{place}/{bits}", strict=False))
    except ValueError:
        raise HostError(f"/proc/net/route holds no route: {row[:60]!r}") from None


def _addressed(host: Host, routes: list[str]) -> set[str]:
    """Interfaces with an address: those with a route of IPv4, which every address brings, or an address of IPv6."""
    six = (system_files.read_optional(host, "/proc/net/if_inet6") or "").splitlines()
    strange = next((row for row in six if not _SIX.fullmatch(row)), None)
    if strange is not None:
        raise HostError(f"/proc/net/if_inet6 holds no address: {strange[:60]!r}")
    # Scope 20 is link-local: every interface that is up has one, and NCCL does not use it.
    return {line.split()[0] for line in routes if line.split()} | {
        words[5] for line in six if len(words := line.split()) == 6 and words[3] != "20"
    }
