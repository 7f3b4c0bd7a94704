"""DCGM's medium diagnostic passes on every GPU: PCIe, GPU memory, and all tests of the short one."""

from __future__ import annotations

from trainmaster.checks.active import _dcgm
from trainmaster.checks.contract import VERDICT
from trainmaster.node.host import Host

LEVEL = 2
GPU = True
EXPECTS = ()
COMPARES = ()
METRICS = {"summary.test_results.dcgm_extended": VERDICT}
RUN_S = 600.0  # `-r 2` takes 2 to 5 minutes on 8 GPUs (NVIDIA, DCGM diagnostics)
TIMEOUT_S = RUN_S + 120


def read(host: Host) -> _dcgm.Evidence:
    return _dcgm.read(host, 2, RUN_S)


judge = _dcgm.judge
