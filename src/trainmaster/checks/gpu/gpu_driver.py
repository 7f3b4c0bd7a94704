"""The NVIDIA driver answers and has the version it should have."""

from __future__ import annotations

import re

from trainmaster.checks import nvidia
from trainmaster.checks.comparison import software
from trainmaster.checks.contract import VERDICT
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok, warn

LEVEL = 1
GPU = True
EXPECTS = ("driver",)
COMPARES = (software("driver", "driver"), software("cuda", "CUDA"))
METRICS = {"summary.test_results.gpu_detection": VERDICT, "gpu.driver_version": "driver"}
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
_KNOWN = re.compile(r"device handle|infoROM is corrupted", re.IGNORECASE)

read = nvidia.read


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    refused = nvidia.refuse(gpus, expect)
    if refused is not None:
        return [refused]
    # What it prints beside its answer is evidence too. gpu_count and gpu_vbios judge the warnings that they know.
    warnings = [line for line in gpus.warnings if not _KNOWN.search(line)]
    action = "run nvidia-smi by hand, and see the kernel log"
    findings = [warn(f"nvidia-smi warns: {line[:160]}", action=action) for line in warnings[:5]]
    return [_judge_version(gpus, expect), *findings]


def _judge_version(gpus: nvidia.Gpus, expect: Expect) -> Finding:
    assert gpus.smi is not None
    driver = gpus.smi.driver
    if driver is None:
        return error("nvidia-smi reports no driver version", action="reinstall the NVIDIA driver")
    # Whole parts only: 580 fits 580.159.04, and 58 does not.
    if expect.driver is not None and not f"{driver}.".startswith(f"{expect.driver.rstrip('.')}."):
        return fail(f"driver {driver}, not {expect.driver}", action=f"install driver {expect.driver}", driver=driver)
    return ok(f"driver {driver}, CUDA up to {gpus.smi.cuda or 'unknown'}", driver=driver, cuda=gpus.smi.cuda)
