"""No process waits for memory. A node that reclaims and refaults pages is slow long before it kills anything."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from trainmaster.core.errors import FileMissing, FileUnreadable, HostError
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok, skip, warn
from trainmaster.node.host import Host

LEVEL = 1
GPU = False
EXPECTS = ("memory_pressure",)
COMPARES = ()
METRICS: dict[str, str] = {}
# Shares of the last minute. systemd-oomd kills at 60 % of `full`; a tenth of that already costs every step.
WARN_SOME = 10.0
WARN_FULL = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """Percent of the last minute in which some, or all, processes stood still for memory."""

    some: float
    full: float


def read(host: Host) -> Pressure | None:
    """None: the kernel does not keep it."""
    try:
        text = host.read("/proc/pressure/memory")
    except FileMissing:
        return None
    except FileUnreadable as error:
        if "not supported" in str(error):  # built in, but switched off (psi=0)
            return None
        raise
    averages = dict(re.findall(r"^(some|full) .*\bavg60=(\d+\.\d+) ", text, flags=re.MULTILINE | re.ASCII))
    if set(averages) != {"some", "full"}:
        raise HostError(f"/proc/pressure/memory cannot be understood: {text[:80]!r}")
    return Pressure(some=float(averages["some"]), full=float(averages["full"]))


def judge(pressure: Pressure | None, expect: Expect) -> Finding:
    if pressure is None:
        if expect.memory_pressure is not None:
            return error("this kernel does not measure memory pressure", action="boot it with psi=1")
        return skip("this kernel does not measure memory pressure", proof="/proc/pressure/memory is not there")
    summary = f"processes stood still for memory {pressure.some:g} % of the last minute"
    values: dict[str, Any] = {"some_percent": pressure.some, "full_percent": pressure.full}
    action = "find who fills the memory (`ps aux --sort=-rss`) and end it, then rerun"
    if expect.memory_pressure is not None and pressure.some > expect.memory_pressure:
        return fail(f"{summary}, more than {expect.memory_pressure:g} %", action=action, **values)
    if expect.memory_pressure is None and (pressure.some > WARN_SOME or pressure.full > WARN_FULL):
        return warn(summary, action=action, **values)
    return ok(summary, **values)
