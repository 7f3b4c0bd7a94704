"""CPUs may run at full speed. A power-saving governor slows kernel launches and collectives by half and more.

`powersave` has two meanings: with intel_pstate or amd-pstate-epp the CPU still speeds up under load, within its energy
preference; with every other driver it stays at its lowest frequency.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from trainmaster.checks import system_files
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok, skip, warn
from trainmaster.node.host import Host

LEVEL = 1
GPU = False
EXPECTS = ("governor",)
COMPARES = ()
METRICS: dict[str, str] = {}
FOLDER = "/sys/devices/system/cpu/cpufreq"
GOVERNORS = ("performance", "powersave", "ondemand", "conservative", "userspace", "schedutil")
PREFERENCES = ("default", "performance", "balance_performance", "balance_power", "power")
_SELF_STEERED = ("intel_pstate", "amd-pstate-epp")
_SAVING = ("power", "balance_power")  # energy preferences that hold the CPU back under load
_ACTION = "run `cpupower frequency-set -g performance` and make it permanent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Frequency policy of one group of CPUs."""

    name: str  # policy0
    driver: str
    governor: str
    preference: str | None  # the energy preference, where the driver has one


def read(host: Host) -> list[Policy]:
    names = [name for name in system_files.list_optional(host, FOLDER) or () if name.startswith("policy")]
    return [
        Policy(
            name=name,
            driver=host.read(f"{FOLDER}/{name}/scaling_driver").strip(),
            governor=host.read(f"{FOLDER}/{name}/scaling_governor").strip(),
            preference=(
                system_files.read_optional(host, f"{FOLDER}/{name}/energy_performance_preference") or ""
            ).strip()
            or None,
        )
        for name in names
    ]


def judge(policies: list[Policy], expect: Expect) -> Finding:
    strange = next((policy for policy in policies if not _known(policy)), None)
    if strange is not None:
        reason = (
            f"{strange.name} has governor {strange.governor[:30]!r} and preference {(strange.preference or '')[:30]!r}"
        )
        return error(reason, action=f"read the files of {FOLDER}/{strange.name} by hand")
    silent = _without_preference(policies)
    if silent is not None:
        reason = f"{silent.name} shows no energy preference; other CPU groups of {silent.driver} do"
        return error(reason, action=f"read the files of {FOLDER}/{silent.name} by hand")
    if not policies:
        if expect.governor is not None:
            reason = f"governor={expect.governor} is expected, and the kernel shows no frequency policy"
            return error(reason, action="load the CPU frequency driver, or leave the expectation out on this machine")
        # A virtual machine: its hypervisor steers the frequency, and nothing in here can.
        return skip("the kernel does not control the CPU frequency here", proof=f"{FOLDER} has no policy")
    counts = Counter(policy.governor for policy in policies)
    summary = ", ".join(f"{count} × {governor}" for governor, count in counts.most_common())
    values: dict[str, Any] = {"governors": dict(counts), "driver": policies[0].driver}
    if expect.governor is not None:
        other = [policy.name for policy in policies if policy.governor != expect.governor]
        if other:
            reason = f"{len(other)} of {len(policies)} CPU groups are not {expect.governor}: {summary}"
            return fail(reason, action=_ACTION, first=other[0], **values)
        return ok(summary, **values)
    slow = [policy for policy in policies if _saves(policy)]
    if slow:
        first = slow[0]
        how = f"{first.governor} with {first.driver}" + (f", preference {first.preference}" if first.preference else "")
        reason = f"{len(slow)} of {len(policies)} CPU groups are held back ({how})"
        return warn(reason, action=_ACTION, first=first.name, **values)
    return ok(summary, **values)


def _known(policy: Policy) -> bool:
    """Whether its words are the kernel's own (drivers/cpufreq); a preference may be a number."""
    preference = policy.preference is None or policy.preference in PREFERENCES or policy.preference.isdigit()
    return policy.governor in GOVERNORS and preference and re.fullmatch(r"[a-z][a-z0-9_-]+", policy.driver) is not None


def _without_preference(policies: list[Policy]) -> Policy | None:
    """A policy without an energy preference, where others of its driver have one."""
    having = {policy.driver for policy in policies if policy.preference is not None}
    return next((policy for policy in policies if policy.preference is None and policy.driver in having), None)


def _saves(policy: Policy) -> bool:
    if policy.driver in _SELF_STEERED:
        return policy.governor == "powersave" and policy.preference in _SAVING
    return policy.governor in ("powersave", "conservative")
