"""Limits of this process's container: CPU time, memory and processes, from cgroup v1 or v2.

Limits hold at every level, so the smallest one from the process's own group up to the top that is mounted counts. A
container without its own view of the tree sees a mount that starts below the top, and one with it a path of `/`; both
are found through /proc/self/mountinfo.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from trainmaster.core.errors import FileMissing, HostError
from trainmaster.node.host import Host

_LEAST = 1 << 20  # bytes; ours: an interpreter takes several times as much
_UNLIMITED = 1 << 60  # v1 writes "no limit" as the largest number of pages


def read_cpu_quota(host: Host) -> float | None:
    """CPUs' worth of time this process may use; None without a limit."""
    quotas: list[float] = []
    for version, folder in _folders(host, "cpu"):
        if version == 2:
            words = _read(host, f"{folder}/cpu.max").split()
            if not words and _read(host, f"{folder}/cpu.max"):
                raise HostError(f"{folder}/cpu.max holds no value")
            if words and not re.fullmatch(r"(max|\d{1,18}) [1-9]\d{0,17}", " ".join(words), flags=re.ASCII):
                raise HostError(f"{folder}/cpu.max cannot be understood: {' '.join(words)[:40]!r}")
            if words and words[0] != "max":
                quotas.append(int(words[0]) / int(words[1]))
        else:
            quota, period = _number(host, f"{folder}/cpu.cfs_quota_us"), _number(host, f"{folder}/cpu.cfs_period_us")
            if quota is not None and quota != -1 and (quota <= 0 or not period or period <= 0):
                raise HostError(f"{folder} has a quota of {quota} in {period} us")
            if quota is not None and quota > 0 and period:
                quotas.append(quota / period)
    return min(quotas, default=None)


def read_memory(host: Host) -> tuple[int, int] | None:
    """The tightest limit in bytes and its unused part; None without a limit."""
    limits: list[tuple[int, int]] = []
    for version, folder in _folders(host, "memory"):
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit = _number(host, f"{folder}/{names[0]}")
        if limit is None or limit >= _UNLIMITED:
            continue
        if limit < _LEAST:
            raise HostError(f"{folder}/{names[0]} holds {limit}, with which no process could run")
        used = _number(host, f"{folder}/{names[1]}")
        if used is None or used < 0:  # a group with a limit counts what it uses
            raise HostError(f"{folder} has a memory limit and no usage")
        limits.append((limit, max(0, limit - used + _cache(host, folder))))
    if not limits:
        return None
    return min(limit for limit, _ in limits), min(free for _, free in limits)


def read_pids(host: Host) -> tuple[int, int] | None:
    """The tightest limit on processes and threads and its unused part; None without a limit."""
    limits: list[tuple[int, int]] = []
    for _, folder in _folders(host, "pids"):
        limit = _number(host, f"{folder}/pids.max")
        if limit is not None:
            used = _number(host, f"{folder}/pids.current") or 0
            if limit < 1 or used < 0:
                raise HostError(f"{folder} allows {limit} processes and counts {used}")
            limits.append((limit, max(0, limit - used)))
    return min(limits, key=lambda pair: pair[1], default=None)


def read_oom_kills(host: Host) -> tuple[int | None, bool]:
    """OOM kills in this process's own group (None: not counted), and whether only a part of the tree is visible.

    The root of the whole v2 tree has no memory.events. A mount whose top has one is a container's.
    """
    ours: int | None = None
    top = ""
    for version, folder in _folders(host, "memory"):
        text = _read(host, f"{folder}/{'memory.events' if version == 2 else 'memory.oom_control'}")
        if any(not re.fullmatch(r"\w+ \d+", line) for line in text.splitlines()):
            raise HostError(f"the OOM counters of {folder} cannot be read")
        match = re.search(r"^oom_kill (\d+)$", text, flags=re.MULTILINE | re.ASCII)
        if match and ours is None:
            ours = int(match[1])
        top = text if version == 2 else ""
    return ours, bool(top)


def _cache(host: Host, folder: str) -> int:
    """Reclaimable file pages; without them every busy disk looks like a full RAM."""
    stat: dict[str, str] = dict(re.findall(r"^(\w+) (\d+)$", _read(host, f"{folder}/memory.stat"), flags=re.MULTILINE))
    # v1 counts the group itself under the plain name, and with all below it, as its usage does, under total_.
    cache = stat.get("total_inactive_file", stat.get("inactive_file"))
    if cache is None:
        raise HostError(f"{folder}/memory.stat has no inactive_file")
    return int(cache)


def _folders(host: Host, controller: str) -> Iterator[tuple[int, str]]:
    """(cgroup version, folder) from this process's own group up to where the tree is mounted."""
    groups = dict(_groups(_whole(host, "/proc/self/cgroup")))
    for version, root, point in _mounts(_whole(host, "/proc/self/mountinfo"), controller):
        path = groups.get("" if version == 2 else controller)
        if path is None:
            continue
        # A path outside the mount is an invisible group of the host; the mount's own is the nearest one.
        inside = PurePosixPath(path).relative_to(root) if PurePosixPath(path).is_relative_to(root) else PurePosixPath()
        if ".." in inside.parts:
            inside = PurePosixPath()
        for part in (inside, *inside.parents) if inside.parts else (inside,):
            yield version, str(PurePosixPath(point) / part)


def _whole(host: Host, path: str) -> str:
    """Text of a file that the kernel never leaves empty. Without its last newline it was cut short."""
    text = host.read(path)
    if not text.strip() or not text.endswith("\n"):
        raise HostError(f"{path} is empty or was cut short")
    return text


def _groups(text: str) -> Iterator[tuple[str, str]]:
    """Controller → path; "" is the one tree of v2."""
    for line in text.splitlines():
        if not re.fullmatch(r"\d{1,4}:[\w,=.-]*:/.*", line):
            raise HostError(f"/proc/self/cgroup cannot be read: {line[:80]!r}")
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in [""] if number == "0" and not controllers else controllers.split(","):
            yield controller, path


def _mounts(text: str, controller: str) -> Iterator[tuple[int, str, str]]:
    """(version, root of the mount within the tree, where it is mounted)."""
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3 or not fields[0].isdigit() or not re.fullmatch(r"[\w.+-]+", kind[0]):
            raise HostError(f"/proc/self/mountinfo cannot be read: {line[:80]!r}")
        if kind[0] == "cgroup2":
            yield 2, fields[3], fields[4]
        elif kind[0] == "cgroup" and controller in kind[2].split(","):
            yield 1, fields[3], fields[4]


def _read(host: Host, path: str) -> str:
    """The file's text; empty where it is missing, which means that this level has no such limit."""
    try:
        return host.read(path)
    except FileMissing:
        return ""


def _number(host: Host, path: str) -> int | None:
    raw = _read(host, path)
    text = raw.strip()
    if not raw or text == "max":  # no such file, or no limit; a file without a value is neither
        return None
    if not re.fullmatch(r"-?\d{1,20}", text, flags=re.ASCII):
        raise HostError(f"{path} holds no number: {text[:40]!r}")
    return int(text)


def free_bytes(host: Host) -> int:
    """Bytes usable without swapping, within the container's limit."""
    match = re.search(r"^MemAvailable:\s+(\d{1,15}) kB$", host.read("/proc/meminfo"), flags=re.MULTILINE | re.ASCII)
    if match is None:
        raise HostError("/proc/meminfo has no MemAvailable")
    limit = read_memory(host)
    free = int(match[1]) * 1024
    return free if limit is None else min(free, limit[1])
