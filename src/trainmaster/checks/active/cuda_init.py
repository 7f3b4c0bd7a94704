"""Every GPU starts: a context, memory, a kernel, its right answer. One that nvidia-smi lists may still refuse work."""

from __future__ import annotations

from collections.abc import Mapping

from trainmaster.checks.active import _probe
from trainmaster.checks.comparison import software
from trainmaster.checks.contract import VERDICT
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok, warn
from trainmaster.node.host import Host

LEVEL = 2
GPU = True
EXPECTS = ()
COMPARES = (software("torch", "torch"), software("torch_cuda", "torch's CUDA"))
METRICS = {"summary.test_results.gpu_detection": VERDICT}
TIMEOUT_S = _probe.CHECK_TIMEOUT_S
SLOW_S = 20.0  # from nothing to the first allocation; without persistence mode it takes a few seconds


def read(host: Host) -> _probe.Probed:
    return _probe.read(host, "cuda_init")


def judge(probed: _probe.Probed, expect: Expect) -> list[Finding]:
    return _probe.judge_all(probed, "cuda_init", expect, _judge_one)


def _judge_one(device: str, report: _probe.Report, _: Mapping[str, _probe.Report]) -> Finding:
    results = report.results
    total, expected = _probe.count(results, "sum"), _probe.count(results, "sum_expected")
    took = _probe.number(results, "allocation_s")
    values = {**report.software, "start_s": round(took, 3)}
    replace = "reset the GPU and run this again; replace it if it repeats"
    if total != expected:
        reason = f"its first kernel gave {total}, not {expected}"
        return fail(reason, action=replace, device=device, **values)
    if results.get("copied_back") is not True:
        return fail("its memory came back different from what it held", action=replace, device=device, **values)
    if took > SLOW_S:
        action = "turn persistence mode on, and see whether the fabric manager is up"
        return warn(f"works, but took {took:.0f} s to start", action=action, device=device, **values)
    return ok(f"starts in {took:.1f} s and computes, with torch {report.torch}", device=device, **values)
