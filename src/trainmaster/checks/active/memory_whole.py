"""All free memory of every GPU holds what is written to it, bit by bit, under many patterns."""

from __future__ import annotations

from trainmaster.checks.active import _memory, _probe
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding
from trainmaster.node.host import Host

LEVEL = 3
GPU = True
EXPECTS = ()
COMPARES = ()
METRICS: dict[str, str] = {}
TIMEOUT_S = _probe.CHECK_TIMEOUT_S


def read(host: Host) -> _probe.Probed:
    return _probe.read(host, "memory_pattern", "--whole")


def judge(probed: _probe.Probed, expect: Expect) -> list[Finding]:
    return _probe.judge_all(probed, "memory_pattern", expect, _memory.judge_one)
