"""Huge pages are there where they are expected, and do not eat the memory where they are not."""

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
GPU = False
EXPECTS = ("huge_pages",)
COMPARES = ()
METRICS: dict[str, str] = {}
TRANSPARENT = "/sys/kernel/mm/transparent_hugepage/enabled"
_TRANSPARENT = re.compile(r"(?:(?:always|madvise|never) )*\[(always|madvise|never)\](?: (?:always|madvise|never))*\s*")
WARN_SHARE = 0.5  # of the memory; ordinary allocations cannot use what is reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    total: int
    free: int
    size_kib: int
    ram_kib: int
    transparent: str | None  # always, madvise or never


def read(host: Host) -> Pages | None:
    """None: the kernel has no huge pages."""
    if "HugePages_Total:" not in host.read("/proc/meminfo"):
        return None
    text = system_files.read_optional(host, TRANSPARENT)
    chosen = None if text is None else _TRANSPARENT.fullmatch(text)
    if text is not None and chosen is None:
        raise HostError(f"{TRANSPARENT} holds {text.strip()[:40]!r}")
    return Pages(
        total=system_files.read_memory_field(host, "HugePages_Total", unit=""),
        free=system_files.read_memory_field(host, "HugePages_Free", unit=""),
        size_kib=system_files.read_memory_field(host, "Hugepagesize"),
        ram_kib=system_files.read_memory_field(host, "MemTotal"),
        transparent=chosen[1] if chosen else None,
    )


def judge(pages: Pages | None, expect: Expect) -> Finding:
    wanted = expect.huge_pages or 0
    action = f"reserve them: `sysctl vm.nr_hugepages={wanted}`, also in /etc/sysctl.d"
    if pages is None:
        if wanted:
            return fail(f"this kernel has no huge pages; {wanted} are expected", action=action)
        return skip("this kernel has no huge pages and none are expected", proof="/proc/meminfo has no HugePages_Total")
    values: dict[str, Any] = {
        "total": pages.total,
        "free": pages.free,
        "size_kib": pages.size_kib,
        "transparent": pages.transparent,
    }
    summary = f"{pages.free} of {pages.total} huge pages of {pages.size_kib} kB free"
    if pages.free < wanted:
        return fail(f"{summary}, not {wanted}", action=action, **values)
    if not pages.total:
        return skip("no huge pages are reserved and none are expected", proof="HugePages_Total is 0", **values)
    share = pages.free * pages.size_kib / max(pages.ram_kib, 1)
    if share > WARN_SHARE:
        reason = f"{summary}: {share:.0%} of the memory is set aside and unused"
        return warn(reason, action="lower vm.nr_hugepages to what the work uses", **values)
    return ok(summary, **values)
