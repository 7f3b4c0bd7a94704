"""Next to nothing is swapped out. A data loader or a checkpoint writer that pages from disk stalls every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainmaster.checks import system_files
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok, skip, warn
from trainmaster.node.host import Host

LEVEL = 1
GPU = False
EXPECTS = ("swap_used_gib",)
COMPARES = ()
METRICS: dict[str, str] = {}
GIB_IN_KIB = 1 << 20
# Daemons that sleep for weeks are swapped out on healthy machines too; more than this was in use.
WARN_GIB = 1.0
WARN_SHARE_OF_RAM = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    total_gib: float
    used_gib: float
    ram_gib: float


def read(host: Host) -> Swap:
    total = system_files.read_memory_field(host, "SwapTotal")
    return Swap(
        total_gib=total / GIB_IN_KIB,
        used_gib=(total - system_files.read_memory_field(host, "SwapFree")) / GIB_IN_KIB,
        ram_gib=system_files.read_memory_field(host, "MemTotal") / GIB_IN_KIB,
    )


def judge(swap: Swap, expect: Expect) -> Finding:
    values: dict[str, Any] = {"used_gib": round(swap.used_gib, 2), "total_gib": round(swap.total_gib, 2)}
    if swap.total_gib == 0:
        return skip("this machine has no swap", proof="SwapTotal is 0", **values)
    summary = f"{swap.used_gib:.1f} of {swap.total_gib:.1f} GiB of swap in use"
    action = "end what filled the memory, then bring it back with `swapoff -a && swapon -a`"
    if expect.swap_used_gib is not None:
        if swap.used_gib > expect.swap_used_gib:
            return fail(f"{summary}, more than {expect.swap_used_gib:g}", action=action, **values)
    elif swap.used_gib > max(WARN_GIB, WARN_SHARE_OF_RAM * swap.ram_gib):
        return warn(summary, action=action, **values)
    return ok(summary, **values)
