"""A share of every GPU's memory holds what is written to it, bit by bit. A cell that does not spoils a run silently.

A quarter of the free memory, in seconds; memory_whole (level 3) takes all of it.
"""

from __future__ import annotations

from trainmaster.checks.active import _memory, _probe
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding
from trainmaster.node.host import Host

LEVEL = 2
GPU = True
EXPECTS = ()
COMPARES = ()
METRICS: dict[str, str] = {}
TIMEOUT_S = _probe.CHECK_TIMEOUT_S


def read(host: Host) -> _probe.Probed:
    return _probe.read(host, "memory_pattern")


def judge(probed: _probe.Probed, expect: Expect) -> list[Finding]:
    return _probe.judge_all(probed, "memory_pattern", expect, _memory.judge_one)
