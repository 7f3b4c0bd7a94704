"""This process may open the RDMA devices. A container without /dev/infiniband sees them and falls back to TCP."""

from __future__ import annotations

from dataclasses import dataclass

from trainmaster.checks import system_files
from trainmaster.core.errors import FileMissing
from trainmaster.core.expect import Expect, implies_efa, implies_rdma
from trainmaster.core.results import Finding, error, fail, ok, skip, warn
from trainmaster.node.host import Host

LEVEL = 1
GPU = False
EXPECTS = ()
COMPARES = ()
METRICS: dict[str, str] = {}
VERBS = "/sys/class/infiniband_verbs"
_ACTION = "start the container with --device=/dev/infiniband (Kubernetes: ask for the RDMA device plugin's resource)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    devices: tuple[str, ...]
    closed: tuple[str, ...]  # devices without a file in /dev


def read(host: Host) -> Access:
    devices = system_files.list_rdma(host)
    if not devices:
        return Access(devices=(), closed=())
    files = system_files.list_optional(host, "/dev/infiniband") or ()
    opened = {_behind(host, name) for name in files if name.startswith("uverbs")}
    return Access(devices=devices, closed=tuple(name for name in devices if name not in opened))


def judge(access: Access, expect: Expect) -> Finding:
    if not access.devices:
        if implies_rdma(expect) or implies_efa(expect):
            return error("there is no RDMA device that could be opened", action="see ib_ports and efa")
        return skip("no RDMA device on this machine", proof="/sys/class/infiniband is empty or absent")
    if access.closed:
        reason = f"no file in /dev/infiniband opens {', '.join(access.closed)}"
        needed = bool(implies_rdma(expect) or implies_efa(expect))
        return (fail if needed else warn)(reason, action=_ACTION, device=access.closed[0], closed=list(access.closed))
    return ok(f"{len(access.devices)} devices may be opened", devices=list(access.devices))


def _behind(host: Host, verbs: str) -> str | None:
    """The RDMA device behind uverbs0."""
    try:
        return host.read(f"{VERBS}/{verbs}/ibdev").strip()
    except FileMissing:
        return None
