"""Memory and GPUs have their place among the NUMA nodes. A GPU without one gets its CPU from the wrong socket."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from trainmaster.checks import system_files
from trainmaster.checks.comparison import part
from trainmaster.core.errors import HostError
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok, skip, warn
from trainmaster.node.host import Host

LEVEL = 1
GPU = False
EXPECTS = ("numa_nodes",)
COMPARES = (part("nodes", "NUMA nodes", "set the BIOS of this node as on the others"),)
METRICS: dict[str, str] = {}
FOLDER = "/sys/devices/system/node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Numa:
    cpus: dict[int, int]  # NUMA node → how many CPUs it has
    memory_kib: dict[int, int]
    gpus: dict[str, int]  # bus address → NUMA node; −1: the firmware does not say
    balancing: bool | None  # the kernel moves pages between nodes by itself


def read(host: Host) -> Numa | None:
    """None: the machine shows no NUMA nodes."""
    online = system_files.read_optional(host, f"{FOLDER}/online")
    if online is None:
        return None
    nodes = sorted(system_files.parse_numbers(online))
    if not nodes:
        raise HostError(f"{FOLDER}/online names no node")
    balancing = system_files.read_optional(host, "/proc/sys/kernel/numa_balancing")
    cpus = {n: len(system_files.parse_numbers(host.read(f"{FOLDER}/node{n}/cpulist"))) for n in nodes}
    usable = len(system_files.parse_numbers(host.read("/sys/devices/system/cpu/online")))
    if sum(cpus.values()) < usable:
        raise HostError(f"the NUMA nodes have {sum(cpus.values())} of {usable} CPUs")
    gpus = system_files.read_pci(host, system_files.NVIDIA, kind="0x03")
    if not gpus and system_files.has_gpus(host):
        raise HostError("/dev has a GPU, and the PCI bus shows none")
    if balancing is not None and not re.fullmatch(r"[0-9]", balancing.strip()):
        raise HostError(f"numa_balancing is {balancing.strip()[:20]!r}")
    places = {bus: system_files.read_number(host, f"{system_files.PCI}/{bus}/numa_node") for bus in gpus}
    lost = next((f"{bus} is on NUMA node {node}" for bus, node in places.items() if node not in (-1, *nodes)), None)
    if lost is not None:
        raise HostError(f"{lost}, and the machine has {', '.join(map(str, nodes))}")
    return Numa(
        cpus=cpus,
        memory_kib={n: _memory(host.read(f"{FOLDER}/node{n}/meminfo")) for n in nodes},
        gpus=places,
        balancing=None if balancing is None else balancing.strip() != "0",
    )


def judge(numa: Numa | None, expect: Expect) -> list[Finding]:
    if numa is None:
        if expect.numa_nodes is not None:
            action = "boot a kernel with NUMA, and switch it on in the firmware"
            return [fail(f"no NUMA nodes are shown; {expect.numa_nodes} are expected", action=action)]
        return [skip("this machine shows no NUMA nodes", proof=f"{FOLDER}/online is not there")]
    homes = [node for node, cpus in numa.cpus.items() if cpus]  # memory of a GPU may be a node without CPUs
    values: dict[str, Any] = {
        "nodes": len(numa.cpus),
        "cpus": {str(node): cpus for node, cpus in numa.cpus.items()},
        "memory_gib": {str(node): round(kib / (1 << 20), 1) for node, kib in numa.memory_kib.items()},
        "gpus": numa.gpus,
        "balancing": numa.balancing,
    }
    findings: list[Finding] = []
    if expect.numa_nodes is not None and len(homes) != expect.numa_nodes:
        reason = f"{len(homes)} NUMA nodes with CPUs, not {expect.numa_nodes}"
        action = "set the firmware's NUMA options (NPS, sub-NUMA clustering) as on the other nodes"
        findings.append(fail(reason, action=action, **values))
    for node in homes:
        if not numa.memory_kib[node]:
            reason = f"NUMA node {node} has {numa.cpus[node]} CPUs and no memory"
            action = "look for failed memory modules in the BMC's log"
            findings.append(warn(reason, action=action, device=f"node{node}"))
    if len(homes) > 1:
        action = "switch NUMA on in the firmware, or tell the hypervisor to pass the topology on"
        findings += [
            warn(f"the GPU at {bus} belongs to no NUMA node", action=action, device=f"gpu{number}", bus=bus)
            for number, (bus, node) in enumerate(numa.gpus.items())
            if node < 0
        ]
    summary = f"{len(homes)} NUMA node{'s' if len(homes) != 1 else ''} with CPUs and memory"
    return findings or [ok(summary, **values)]


def _memory(text: str) -> int:
    match = re.search(r"^Node \d+ MemTotal:\s+(\d+) kB$", text, flags=re.MULTILINE | re.ASCII)
    if not match:
        raise HostError("a NUMA node does not tell its memory")
    return int(match[1])
