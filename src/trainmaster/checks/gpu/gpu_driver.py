"""The NVIDIA driver answers and has the version it should have."""

from __future__ import annotations

from trainmaster.checks import nvidia
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok
from trainmaster.node.host import Host

LEVEL = 1
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S


def read(host: Host) -> nvidia.Gpus:
    return nvidia.read(host)


def judge(gpus: nvidia.Gpus, expect: Expect) -> Finding:
    refused = nvidia.refuse(gpus, expect)
    if refused is not None:
        return refused
    assert gpus.smi is not None
    driver = gpus.smi.driver
    if driver is None:
        return error("nvidia-smi does not tell the driver's version", action="reinstall the NVIDIA driver")
    # Whole parts only: 580 fits 580.159.04, and 58 does not.
    if expect.driver is not None and not f"{driver}.".startswith(f"{expect.driver.rstrip('.')}."):
        return fail(f"driver {driver}, not {expect.driver}", action=f"install driver {expect.driver}", driver=driver)
    return ok(f"driver {driver}, CUDA up to {gpus.smi.cuda or 'unknown'}", driver=driver, cuda=gpus.smi.cuda)
