"""The kernel reports its release, for comparing nodes: another kernel has other drivers, limits and bugs."""

from __future__ import annotations

import re

from trainmaster.checks.comparison import EqualValue
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, Verdict, error, ok
from trainmaster.node.host import Host

LEVEL = 1
GPU = False
EXPECTS = ()
COMPARES = (
    EqualValue(
        name="kernel",
        words="kernel",
        verdict=Verdict.WARN,
        action="boot the kernel that the others run, or update the others",
        everywhere=True,
    ),
)
METRICS: dict[str, str] = {}


def read(host: Host) -> str:
    return host.read("/proc/sys/kernel/osrelease").strip()


def judge(release: str, expect: Expect) -> Finding:  # noqa: ARG001 (the release is compared between nodes)
    if not re.fullmatch(r"\d+\.\d+[\w.+~-]*", release, flags=re.ASCII) or re.search(r"~\W|-{2}|-$|\.$", release):
        return error(f"its release is {release!r:.60}", action="look at /proc/sys/kernel/osrelease")
    return ok(f"kernel {release}", kernel=release)
