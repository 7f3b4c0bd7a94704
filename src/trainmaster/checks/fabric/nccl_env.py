"""No variable holds NCCL back from the fabric that is here. One forgotten debugging switch costs 100 × the bandwidth.

Variables count from the environment and from NCCL's own files (~/.nccl.conf, then /etc/nccl.conf), as NCCL reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trainmaster.checks import system_files
from trainmaster.checks.comparison import setting
from trainmaster.checks.fabric import _rdma_devices
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok, warn
from trainmaster.node.host import Host

LEVEL = 1
GPU = False
EXPECTS = ()
# Ranks whose settings differ may choose different transports and wait for each other.
COMPARES = (setting("variables", "variables of NCCL"),)
METRICS: dict[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    value: str
    where: str  # "the environment", or the file


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclSetup:
    """Settings, and the hardware they apply to."""

    settings: dict[str, Setting]
    gpus: int
    ports: tuple[str, ...]  # InfiniBand and RoCE ports that are up
    efa: int  # EFA devices
    topology: bool  # whether the file of NCCL_TOPO_FILE is there
    unread: str | None = None  # why a device of the fabric is unknown

    @property
    def fabric(self) -> bool:
        return bool(self.ports or self.efa)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """When a value does harm and why. `grave`: a failure if the profile expects what it breaks."""

    harms: Callable[[str, NcclSetup], bool]
    reason: str
    action: str = "unset it"
    grave: Literal["fabric", "links"] | None = None


def _on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "n")


def _takes_no_port(value: str, setup: NcclSetup) -> bool:
    """NCCL_IB_HCA: prefixes of devices, exact after `=`, all others after `^`, each with or without a port."""
    other, names = value.startswith("^"), value.removeprefix("^")
    exact, names = names.startswith("="), names.removeprefix("=")

    def hit(port: str) -> bool:
        device, _, number = port.partition(":")
        for word in filter(None, names.split(",")):
            name, _, wanted = word.partition(":")
            if (device == name if exact else device.startswith(name)) and wanted.split(":")[0] in ("", number):
                return True
        return False

    return bool(setup.ports) and not any(hit(port) != other for port in setup.ports)


RULES: dict[str, Rule] = {
    "NCCL_IB_DISABLE": Rule(
        harms=lambda value, setup: _on(value) and bool(setup.ports),
        reason="switches off the InfiniBand or RoCE ports that are up; all traffic goes over TCP",
        grave="fabric",
    ),
    "NCCL_IB_HCA": Rule(
        harms=_takes_no_port,
        reason="fits no InfiniBand or RoCE port that is up; all traffic goes over TCP",
        action="name devices that are there, or unset it",
        grave="fabric",
    ),
    "NCCL_NET": Rule(
        harms=lambda value, setup: (
            (value.lower() == "socket" and setup.fabric)
            or (value.lower() == "ib" and setup.efa > 0 and not setup.ports)
        ),
        reason="keeps NCCL from the fabric that is here",
        grave="fabric",
    ),
    "NCCL_NET_PLUGIN": Rule(
        harms=lambda value, setup: value.lower() == "none" and setup.efa > 0,
        reason="keeps NCCL from loading the plugin that speaks EFA",
        grave="fabric",
    ),
    "FI_PROVIDER": Rule(
        harms=lambda value, setup: setup.efa > 0 and "efa" not in value.split(","),
        reason="makes libfabric use another provider than efa",
        action="set FI_PROVIDER=efa, or unset it",
        grave="fabric",
    ),
    "FI_EFA_USE_DEVICE_RDMA": Rule(
        harms=lambda value, setup: setup.efa > 0 and not _on(value),
        reason="switches off EFA's RDMA reads, and with them GPUDirect",
    ),
    "NCCL_P2P_DISABLE": Rule(
        harms=lambda value, setup: _on(value) and setup.gpus > 1,
        reason="sends the traffic between this node's GPUs through the CPU's memory instead of NVLink",
        grave="links",
    ),
    "NCCL_P2P_LEVEL": Rule(
        harms=lambda value, setup: value.upper() in ("LOC", "0") and setup.gpus > 1,
        reason="forbids GPUs to reach each other, as NCCL_P2P_DISABLE does",
        grave="links",
    ),
    "NCCL_SHM_DISABLE": Rule(
        harms=lambda value, setup: _on(value) and setup.gpus > 1,
        reason="sends what shared memory would carry over the network",
        action="unset it, and give the container a larger /dev/shm if that was the reason",
    ),
    "NCCL_NET_GDR_LEVEL": Rule(
        harms=lambda value, setup: value.upper() in ("LOC", "0") and setup.fabric and setup.gpus > 0,
        reason="switches off GPUDirect RDMA; every byte goes through the CPU's memory",
    ),
    "NCCL_NVLS_ENABLE": Rule(
        # 8 × H200: 482 GB/s with NVLink SHARP, 367 as a ring (stas00/ml-engineering, network).
        harms=lambda value, setup: value.strip() == "0" and setup.gpus >= 8,
        reason="switches off NVLink SHARP, a quarter of the all_reduce bandwidth of 8 GPUs that have it",
    ),
    "NCCL_ALGO": Rule(
        harms=lambda _value, setup: setup.gpus > 0,
        reason="fixes the algorithm for every message size; NCCL knows better for most",
        action="unset it after measuring",
    ),
    "NCCL_PROTO": Rule(
        # Old images for EFA set `simple`, which was right for their plugin.
        harms=lambda value, setup: setup.gpus > 0 and not (setup.efa and value.lower() == "simple"),
        reason="fixes the protocol for every message size; small messages lose most",
        action="unset it after measuring",
    ),
    "NCCL_MAX_NCHANNELS": Rule(
        harms=lambda value, setup: value.isdecimal() and int(value) < 4 and setup.gpus > 1,
        reason="leaves NCCL too few channels to fill NVLink or the network",
    ),
    "NCCL_IB_TIMEOUT": Rule(
        # 4.096 µs × 2^14 is 67 ms: shorter than a switch needs to reroute. NCCL's own is 20.
        harms=lambda value, setup: value.isdecimal() and 0 < int(value) < 14 and bool(setup.ports),
        reason="gives up on a packet sooner than a switch can reroute it",
        action="unset it: NCCL's own is 20",
    ),
    "NCCL_TOPO_FILE": Rule(
        harms=lambda _value, setup: not setup.topology,
        reason="names a file that is not there; NCCL guesses the topology",
        action="name the file of this instance type, or unset it",
    ),
    "NCCL_DEBUG": Rule(
        harms=lambda value, _scene: value.upper() == "TRACE",
        reason="logs every call: gigabytes, and slower",
        action="use NCCL_DEBUG=WARN, or INFO for one run",
    ),
    "CUDA_LAUNCH_BLOCKING": Rule(
        harms=lambda value, setup: _on(value) and setup.gpus > 0,
        reason="makes every kernel wait for the one before to end",
    ),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": Rule(
        harms=lambda value, setup: value.strip() == "0" and setup.gpus > 0,
        reason="lets a collective that lost a peer hang for ever",
    ),
}


def read(host: Host) -> NcclSetup:
    devices = _rdma_devices.read(host)
    settings = _settings(host)
    topology = settings.get("NCCL_TOPO_FILE")
    return NcclSetup(
        settings=settings,
        gpus=sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in system_files.list_devices(host)),
        ports=tuple(port.name for port in _rdma_devices.ports(devices) if port.up),
        efa=sum(device.efa for device in devices),
        topology=topology is not None and system_files.read_optional(host, topology.value) is not None,
        unread=next((trouble.reason for device in devices for trouble in device.every_trouble), None),
    )


def judge(setup: NcclSetup, expect: Expect) -> list[Finding]:
    findings = []
    expected = {"fabric": bool(expect.ib_ports or expect.efa_devices), "links": bool(expect.nvlinks)}
    variables = ", ".join(f"{name}={each.value}" for name, each in sorted(setup.settings.items())) or "none set"
    for name, each in setup.settings.items():
        rule = RULES[name]
        if not rule.harms(each.value, setup):
            continue
        verdict = fail if rule.grave is not None and expected[rule.grave] else warn
        reason = f"{name}={each.value} ({each.where}) {rule.reason}"
        findings.append(verdict(reason, action=rule.action, device=name, value=each.value, variables=variables))
    if findings:
        return findings
    if setup.settings and setup.unread is not None:
        reason = f"what {', '.join(setup.settings)} does here is unknown: {setup.unread}"
        return [error(reason, action="see ib_ports and efa", variables=variables)]
    if not setup.settings:
        return [ok("no variable is set that could slow NCCL down", variables=variables)]
    return [ok(f"nothing harmful in {variables}", variables=variables)]


def _settings(host: Host) -> dict[str, Setting]:
    """Settings by precedence: the environment, the user's file, the system's file."""
    home = host.env("HOME")
    files = [path for path in (home and f"{home}/.nccl.conf", "/etc/nccl.conf") if path and path.startswith("/")]
    files_read = [(path, _conf(system_files.read_optional(host, path) or "")) for path in files]
    settings: dict[str, Setting] = {}
    for name in RULES:
        sources = [("the environment", host.env(name)), *((path, conf.get(name)) for path, conf in files_read)]
        first = next(((value, where) for where, value in sources if value), None)
        if first is not None:
            settings[name] = Setting(value=first[0], where=first[1])
    return settings


def _conf(text: str) -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    return {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines if "=" in line)}
