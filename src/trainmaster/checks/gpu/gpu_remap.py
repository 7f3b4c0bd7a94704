"""No memory row waits to be remapped and no remapping failed. The next error in such a row ends the job."""

from __future__ import annotations

from trainmaster.checks import nvidia
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok, skip, warn
from trainmaster.node.host import Host

LEVEL = 1
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
PENDING = "remapped_rows/remapped_row_pending"


def read(host: Host) -> nvidia.Gpus:
    return nvidia.read(host)


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    return nvidia.judge_each(gpus, expect, _judge_one)


def _judge_one(gpu: nvidia.Gpu, device: str) -> Finding:
    if not gpu.said(PENDING):
        return skip("this driver tells nothing of remapped rows", device=device)
    pending, failed = gpu.yes(PENDING), gpu.yes("remapped_rows/remapped_row_failure")
    corrected, hard = (int(gpu.number("", f"remapped_rows/remapped_row_{name}")) for name in ("corr", "unc"))
    values = {"pending": pending, "failed": failed, "corrected": corrected, "uncorrectable": hard}
    if failed:
        action = "take the GPU out of service and have it replaced"
        return fail("a memory row could not be remapped", action=action, device=device, **values)
    if pending:
        action = "drain the node and reset the GPU"
        return fail("a memory row waits to be remapped", action=action, device=device, **values)
    spent = "remapped_rows/row_remapper_histogram/row_remapper_histogram_none"
    if gpu.tells(spent) and gpu.number(" bank(s)", spent) > 0:
        reason = f"{gpu.number(' bank(s)', spent):g} memory banks have no spare row left"
        return warn(reason, action="plan to have the GPU replaced", device=device, **values)
    return ok(f"no row waits; {corrected + hard} were remapped in its life", device=device, **values)
