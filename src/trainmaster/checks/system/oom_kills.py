"""Nothing was killed for lack of memory since boot. A node that ran out once runs out again under the same work.

Three sources: the container's own counter, the machine's counter, and the kernel log, which alone separates a machine
that ran out of memory from a container that reached its own limit (which is the purpose of a limit).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from trainmaster.checks import system_files
from trainmaster.core.errors import HostError, NotCaptured
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok, skip, warn
from trainmaster.node import cgroup
from trainmaster.node.host import Host
from trainmaster.node.parse import kernel_log

LEVEL = 1
GPU = False
EXPECTS = ("oom_kills",)
COMPARES = ()
METRICS: dict[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kills:
    machine: int  # since boot, everywhere
    ours: int | None  # in this process's own group and the groups above it; None: not counted
    contained: bool  # the machine's memory is shared with others that we do not see
    logged: tuple[kernel_log.OomKill, ...] | None  # None: the kernel log may not be read
    gpus: bool


def read(host: Host) -> Kills:
    match = re.search(r"^oom_kill (\d+)$", host.read("/proc/vmstat"), flags=re.MULTILINE | re.ASCII)
    if not match:
        raise HostError("/proc/vmstat has no oom_kill (Linux before 4.13)")
    ours, contained = cgroup.read_oom_kills(host)
    # Read only if a kill was counted: the log has many megabytes and needs root in most places.
    logged = _logged(host) if int(match[1]) else ()
    return Kills(machine=int(match[1]), ours=ours, contained=contained, logged=logged, gpus=system_files.has_gpus(host))


def judge(kills: Kills, expect: Expect) -> Finding:
    by_limit = sum(kill.count for kill in kills.logged or () if kill.cgroup)
    by_machine = [kill for kill in kills.logged or () if not kill.cgroup]
    values: dict[str, Any] = {"since_boot": kills.machine, "in_our_group": kills.ours, "by_a_limit": by_limit}
    action = "see who was killed (`dmesg | grep -i 'killed process'`) and give it less work or more memory"
    if expect.oom_kills is not None and kills.machine > expect.oom_kills:
        return fail(
            f"{kills.machine} processes killed since boot, more than {expect.oom_kills}", action=action, **values
        )
    if by_machine and expect.oom_kills is None:
        last = by_machine[-1]
        count = sum(kill.count for kill in by_machine)
        return warn(
            f"the machine ran out of memory and killed {count} processes, last {last.process}",
            action=action,
            process=last.process,
            **values,
        )
    if kills.ours and expect.oom_kills is None:
        return warn(
            f"{kills.ours} processes of this container were killed at its memory limit",
            action="raise the container's memory limit, or use less",
            **values,
        )
    unexplained = kills.machine - by_limit
    if unexplained > 0 and kills.gpus and not kills.contained and expect.oom_kills is None:
        return warn(f"{kills.machine} processes killed for lack of memory since boot", action=action, **values)
    if not kills.machine:
        return ok("none since boot", **values)
    if unexplained > 0 and kills.contained:
        reason = f"{kills.machine} kills on this machine since boot, and its kernel log does not explain them"
        return skip(reason, proof=f"this container's own counter is {kills.ours}", **values)
    explanation = (
        "all at a container's own limit" if unexplained <= 0 else "none of them known to be the machine's fault"
    )
    return ok(f"{kills.machine} since boot, {explanation}", **values)


def _logged(host: Host) -> tuple[kernel_log.OomKill, ...] | None:
    try:
        result = system_files.run_dmesg(host)
    except NotCaptured:
        raise
    except HostError:
        return None
    if result.exit_code or not result.stdout.strip() or not result.stdout.endswith("\n"):
        return None
    return kernel_log.parse(result.stdout).oom_kills
