"""NCCL and gloo find a network interface that is up and has an address. Ranks meet through it before any RDMA."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from trainmaster.checks import system_files
from trainmaster.core.errors import HostError
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok, skip, warn
from trainmaster.node.host import Host

LEVEL = 1
NET = "/sys/class/net"
VARIABLE = "NCCL_SOCKET_IFNAME"
# Documentation/networking/operstates.rst
STATES = ("unknown", "notpresent", "down", "lowerlayerdown", "testing", "dormant", "up")
_ROUTE = re.compile(r"\S+\s+[0-9A-F]{8}(?:\s|$)", re.ASCII)  # interface, destination
# Bridges and tunnels inside one machine: no other node can reach an address on them.
_INWARD = re.compile(r"(virbr|br-|cni|flannel|cali|veth|podman|lxc|lxd|kube|tunl|vxlan|docker|dummy|ifb).*")


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
class Interfaces:
    found: tuple[Interface, ...]
    nccl: str | None
    gloo: str | None
    gpus: bool


def read(host: Host) -> Interfaces:
    addressed = _addressed(host)
    found = []
    for name in host.list(NET):
        if system_files.read_optional(host, f"{NET}/{name}/ifindex") is None:
            continue  # bonding_masters is a file among the folders
        flags = system_files.read_number(host, f"{NET}/{name}/flags", base=16)
        index = system_files.read_number(host, f"{NET}/{name}/ifindex")
        shown = system_files.read_optional(host, f"{NET}/{name}/operstate")
        state = (shown or "").strip()
        if shown is not None and state not in STATES:
            raise HostError(f"the state of {name} is {state[:20]!r}")
        # Loopback and tunnels report the state unknown; administratively up is enough for them.
        up = bool(flags & 1) and state in ("up", "unknown")
        found.append(Interface(name=name, index=index, up=up, addressed=name in addressed or name == "lo"))
    return Interfaces(
        found=tuple(sorted(found, key=lambda interface: interface.index)),
        nccl=host.env(VARIABLE),
        gloo=host.env("GLOO_SOCKET_IFNAME"),
        gpus=system_files.has_gpus(host),
    )


def judge(interfaces: Interfaces, expect: Expect) -> list[Finding]:  # noqa: ARG001 (the environment states it)
    findings = [_judge_named(interfaces) if interfaces.nccl else _judge_found(interfaces)]
    if interfaces.gloo:
        missing = set(interfaces.gloo.split(",")) - {item.name for item in interfaces.found}
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
    taken = [item for item in interfaces.found if matches(names, item.name)]
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


def _judge_found(interfaces: Interfaces) -> Finding:
    usable = [item.name for item in interfaces.found if item.usable and item.name != "lo"]
    # NCCL prefers IP over InfiniBand, and uses Docker interfaces only if there is no other.
    usable = [name for name in usable if name.startswith("ib")] or [
        name for name in usable if not name.startswith("docker")
    ]
    if not usable:
        proof = f"{len(interfaces.found)} interfaces, none but loopback up and with an address"
        return skip("this node can only work alone", proof=proof)
    values: dict[str, Any] = {"interfaces": usable}
    outward = [name for name in usable if not _INWARD.fullmatch(name)]
    if interfaces.gpus and outward and outward[0] != usable[0]:
        reason = f"NCCL would take {usable[0]} first, which is reachable only from this machine"
        return warn(reason, action=f"set {VARIABLE}={outward[0]}", device=usable[0], **values)
    return ok(f"NCCL would use {usable[0]}", **values)


def _there(interfaces: Interfaces) -> str:
    return f"there are {', '.join(item.name for item in interfaces.found)}"


def _addressed(host: Host) -> set[str]:
    """Interfaces with an address: those with a route of IPv4, which every address brings, or an address of IPv6."""
    text = system_files.read_optional(host, "/proc/net/route")
    routes = (text or "").splitlines()[1:]
    if text is not None and (not text.endswith("\n") or any(not _ROUTE.match(line) for line in routes)):
        raise HostError("/proc/net/route cannot be read whole")
    six = (system_files.read_optional(host, "/proc/net/if_inet6") or "").splitlines()
    # Scope 20 is link-local: every interface that is up has one, and NCCL does not use it.
    return {line.split()[0] for line in routes if line.split()} | {
        words[5] for line in six if len(words := line.split()) == 6 and words[3] != "20"
    }
