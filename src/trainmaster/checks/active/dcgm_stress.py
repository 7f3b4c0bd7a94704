"""DCGM's long diagnostic passes on every GPU: memory, PCIe, compute and power under load."""

from __future__ import annotations

from trainmaster.checks.active import _dcgm
from trainmaster.checks.contract import VERDICT
from trainmaster.node.host import Host

LEVEL = 3
GPU = True
EXPECTS = ()
COMPARES = ()
METRICS = {"summary.test_results.dcgm_extended": VERDICT}
RUN_S = 3600.0  # `-r 3` takes 10 to 35 minutes on 8 GPUs (NVIDIA, DCGM diagnostics)
TIMEOUT_S = RUN_S + 120


def read(host: Host) -> _dcgm.Evidence:
    return _dcgm.read(host, 3, RUN_S)


judge = _dcgm.judge
