"""Enough processes and threads may be started. Where the limit bites, a rank dies as "can't start new thread"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainmaster.checks import system_files
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok, warn
from trainmaster.node import cgroup
from trainmaster.node.host import Host

LEVEL = 1
GPU = False
EXPECTS = ("processes",)
COMPARES = ()
METRICS: dict[str, str] = {}
# A rank with its data loaders, NCCL's proxies and a maths library starts 100 threads and more; a node has 8 ranks.
WARN_BELOW = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    user: int | None  # of the user, ulimit -u; None is unlimited
    group: tuple[int, int] | None  # of the container: the limit, and what of it is left


def read(host: Host) -> Limits:
    return Limits(user=system_files.read_limit(host, "Max processes"), group=cgroup.read_pids(host))


def judge(limits: Limits, expect: Expect) -> Finding:
    limit, room = limits.group or (None, None)
    left = min((number for number in (limits.user, room) if number is not None), default=None)
    values: dict[str, Any] = {"left": left, "user_limit": limits.user, "group_limit": limit}
    if left is None:
        return ok("as many as the machine can hold", **values)
    by_group = left == room
    summary = f"{left} more may be started" + (" in this container" if by_group else " by this user")
    action = (
        "start the container with --pids-limit=-1 (Kubernetes: raise podPidsLimit of the kubelet)"
        if by_group
        else "set `* - nproc unlimited` in /etc/security/limits.conf"
    )
    if expect.processes is not None:
        if left < expect.processes:
            return fail(f"{summary}, not {expect.processes}", action=action, **values)
        return ok(summary, **values)
    return warn(summary, action=action, **values) if left < WARN_BELOW else ok(summary, **values)
