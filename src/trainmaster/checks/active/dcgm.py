"""DCGM's short diagnostic passes on every GPU: libraries, permissions, memory pages, graphics processes."""

from __future__ import annotations

from trainmaster.checks.active import _dcgm
from trainmaster.checks.contract import VERDICT
from trainmaster.node.host import Host

LEVEL = 2
GPU = True
EXPECTS = ("dcgm",)
COMPARES = ()
METRICS = {"summary.test_results.dcgm_basic": VERDICT}
RUN_S = 180.0  # `-r 1` takes seconds; a cold host engine up to a minute
TIMEOUT_S = RUN_S + 120


def read(host: Host) -> _dcgm.Evidence:
    return _dcgm.read(host, 1, RUN_S)


judge = _dcgm.judge
