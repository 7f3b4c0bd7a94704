"""Readers of /proc and /sys that several checks share."""

from __future__ import annotations

import errno
import re

from trainmaster.core.errors import FileMissing, FileUnreadable, HostError, NotCaptured
from trainmaster.node.host import CommandResult, Host

PCI = "/sys/bus/pci/devices"
RDMA = "/sys/class/infiniband"
# Interface, destination, and where the row goes on: gateway, flags, three numbers, mask. A lost cell shifts the others.
_ROUTE = re.compile(
    r"\S+\s+[0-9A-F]{8}(?:\s+[0-9A-F]{8}\s+[0-9A-F]{4}\s+-?\d+\s+-?\d+\s+-?\d+\s+[0-9A-F]{8}(?:\s.*)?)?\s*$", re.ASCII
)
NVIDIA, MELLANOX, AMAZON = "0x10de", "0x15b3", "0x1d0f"


def read_optional(host: Host, path: str) -> str | None:
    """Text of a file; None only if it does not exist. An unreadable file still raises."""
    try:
        return host.read(path)
    except FileMissing:
        return None


def list_optional(host: Host, path: str) -> tuple[str, ...] | None:
    """Names in a folder; None only if it does not exist."""
    try:
        return host.list(path)
    except FileMissing:
        return None


def code_of(failure: HostError) -> int | None:
    """Number of the system's reason (errno); None: it gave none."""
    return failure.code if isinstance(failure, FileUnreadable) else None


def advise(code: int | None, path: str = "what is named here") -> str:
    """What to do about a file that cannot be read. Rights are named only where they are the cause."""
    if code in (errno.EACCES, errno.EPERM):
        return "make it readable for this user, or skip the check by name"
    if code == errno.EIO:
        return "see the kernel log: the device behind it, or its driver, does not answer"
    return f"read {path} by hand, and see the kernel log"


def read_number(host: Host, path: str, *, base: int = 10) -> int:
    """Integer in a file, as most of /sys have it."""
    text = host.read(path).strip()
    # int() alone takes digits of every script, underscores and blanks.
    if not re.fullmatch(r"-?(?:0x)?[0-9a-fA-F]{1,20}" if base == 16 else r"-?\d{1,20}", text, re.ASCII):
        raise HostError(f"{path} holds no number: {text[:40]!r}")
    return int(text, base)


def run_dmesg(host: Host) -> CommandResult:
    """The kernel's own messages in its ring buffer, without those that programs wrote to /dev/kmsg.

    busybox knows no -k, and older captures hold the plain command: there a program's line is told by its text alone.
    """
    try:
        result = host.run("dmesg", "-k")
    except NotCaptured:
        return host.run("dmesg")
    unknown = result.exit_code and re.search(r"(?:invalid|unrecognized|unknown) option", result.stderr + result.stdout)
    return host.run("dmesg") if unknown else result


def read_routes(host: Host) -> list[str]:
    """Rows of /proc/net/route; none where the kernel has no IPv4."""
    text = read_optional(host, "/proc/net/route")
    if text is None:
        return []
    head, *rows = text.splitlines() or [""]
    if not text.endswith("\n") or not head.startswith("Iface") or any(not _ROUTE.match(row) for row in rows):
        raise HostError("/proc/net/route cannot be read whole")
    return rows


def has_gpus(host: Host) -> bool:
    """Whether /dev has an NVIDIA GPU: the machine is then judged as a training node."""
    return any(re.fullmatch(r"nvidia\d+", name) for name in list_devices(host))


def list_devices(host: Host) -> tuple[str, ...]:
    """Names in /dev. It is never empty."""
    names = host.list("/dev")
    if not names:
        raise HostError("/dev is empty")
    return names


def list_rdma(host: Host) -> tuple[str, ...]:
    """Names of the RDMA devices. An empty list beside openable devices is no answer."""
    names = list_optional(host, RDMA) or ()
    if not names:
        try:
            opened = list_optional(host, "/dev/infiniband") or ()
        except NotCaptured:
            opened = ()
        if any(name.startswith("uverbs") for name in opened):
            raise HostError(f"{RDMA} shows no device, but /dev/infiniband has {len(opened)}")
    return names


def read_pci(host: Host, vendor: str, *, kind: str) -> tuple[str, ...]:
    """PCI addresses of a vendor's devices whose class begins with `kind`; empty without a PCI bus."""
    addresses = []
    for address in list_optional(host, PCI) or ():
        maker = host.read(f"{PCI}/{address}/vendor").strip()
        if not re.fullmatch(r"0x[0-9a-f]{4}", maker, re.IGNORECASE):
            raise HostError(f"the PCI bus is unreadable: {maker!r:.40} is no vendor")
        if maker != vendor:
            continue
        shown = host.read(f"{PCI}/{address}/class").strip()
        if not re.fullmatch(r"0x[0-9a-f]{6}", shown, re.IGNORECASE):
            raise HostError(f"the PCI bus is unreadable: {shown!r:.40} is no class")
        if shown.startswith(kind):
            addresses.append(address)
    return tuple(addresses)


def read_limit(host: Host, name: str) -> int | None:
    """Soft limit in /proc/self/limits; None is unlimited."""
    match = re.search(
        rf"^{re.escape(name)}\s+(\d+|unlimited)\s+(?:\d+|unlimited)\s+[a-z]+\s*$",
        host.read("/proc/self/limits"),
        flags=re.MULTILINE | re.ASCII,
    )
    if not match:
        raise HostError(f"/proc/self/limits has no {name}")
    return None if match[1] == "unlimited" else int(match[1])


def read_memory_field(host: Host, name: str, unit: str = " kB") -> int:
    """Field of /proc/meminfo, in its own unit (kB, or none for counts)."""
    match = re.search(rf"^{name}:\s+(\d+){unit}$", host.read("/proc/meminfo"), flags=re.MULTILINE | re.ASCII)
    if not match:
        raise HostError(f"/proc/meminfo has no {name}")
    return int(match[1])


def parse_numbers(text: str) -> set[int]:
    """Kernel list format: `0-3,8` is {0, 1, 2, 3, 8}; an empty line is the empty set."""
    numbers: set[int] = set()
    for piece in filter(None, text.strip().split(",")):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", piece, flags=re.ASCII)
        if not match:
            raise HostError(f"{text.strip()[:80]!r} is not a list of numbers")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise HostError(f"{text.strip()[:80]!r} is not a list of numbers")
        numbers.update(range(first, last + 1))
    return numbers
