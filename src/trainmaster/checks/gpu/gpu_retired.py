"""No memory page waits to be retired, on GPUs that retire pages (before Ampere). The next error there ends the job."""

from __future__ import annotations

from trainmaster.checks import nvidia
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok
from trainmaster.node.host import Host

LEVEL = 1
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
PENDING = ("retired_pages/pending_retirement", "retired_pages/pending_blacklist")
KINDS = ("multiple_single_bit", "double_bit")
FAIL_PAGES = 60  # the GPU keeps 64 (NVIDIA, Dynamic Page Retirement); behind them nothing is retired any more


def read(host: Host) -> nvidia.Gpus:
    return nvidia.read(host)


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    return nvidia.judge_each(gpus, expect, _judge_one)


def _judge_one(gpu: nvidia.Gpu, device: str) -> Finding:
    pending = gpu.yes(*PENDING)
    single, double = (int(gpu.number("", f"retired_pages/{kind}_retirement/retired_count")) for kind in KINDS)
    values = {"pending": pending, "single_bit": single, "double_bit": double}
    if pending:
        action = "drain the node and reset the GPU"
        return fail("a memory page waits to be retired", action=action, device=device, **values)
    if single + double >= FAIL_PAGES:
        action = "take the GPU out of service and have it replaced"
        return fail(f"{single + double} memory pages are retired", action=action, device=device, **values)
    return ok(f"no page waits; {single + double} are retired", device=device, **values)
