"""No memory page is pending retirement (GPUs before Ampere). The next error in such a page ends the job."""

from __future__ import annotations

from trainmaster.checks import nvidia
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok, skip

LEVEL = 1
GPU = True
EXPECTS = ()
COMPARES = ()
METRICS: dict[str, str] = {}
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
PENDING = ("retired_pages/pending_retirement", "retired_pages/pending_blacklist")
ROWS = "remapped_rows/remapped_row_pending"
KINDS = ("multiple_single_bit", "double_bit")
FAIL_PAGES = 60  # the GPU keeps 64 (NVIDIA, Dynamic Page Retirement); beyond them no page is retired

read = nvidia.read


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    return nvidia.judge_each(gpus, expect, lambda gpu, device: _judge_one(gpu, device, gpus))


def _judge_one(gpu: nvidia.Gpu, device: str, gpus: nvidia.Gpus) -> Finding:
    generation = nvidia.generation(gpu)
    if not gpu.reports(*PENDING) and generation is not None and generation not in nvidia.RETIRES_PAGES:
        return skip("it remaps rows instead of retiring pages", proof=f"its generation is {generation}", device=device)
    if not gpu.reports(*PENDING) and not nvidia.peers_report(gpus, gpu, *PENDING):
        if gpu.reports(ROWS):
            proof = f"it reports remapped rows: pending {gpu.text(ROWS)}"
            return skip("it remaps rows instead of retiring pages", proof=proof, device=device)
        if nvidia.is_desktop(gpu):
            return skip("a desktop board retires no pages", proof=f"it is a {gpu.name}", device=device)
    counts = {kind: _count(gpu, kind) for kind in KINDS}
    known = {kind: count for kind, count in counts.items() if isinstance(count, int)}
    pending = gpu.yes(*PENDING) if gpu.reports(*PENDING) else None
    values = {"pending": pending, "single_bit": counts[KINDS[0]], "double_bit": counts[KINDS[1]]}
    if pending:
        return fail("a memory page is pending retirement", action=nvidia.RESET, device=device, **values)
    if sum(known.values()) >= FAIL_PAGES:
        return fail(f"{sum(known.values())} memory pages are retired", action=nvidia.REPLACE, device=device, **values)
    if pending is None or len(known) < len(KINDS):
        reason = "it does not report " + ("pending retirements" if pending is None else "its retired pages")
        return error(reason, action=nvidia.RESET_OR_REBOOT, device=device)
    return ok(f"no page is pending; {sum(known.values())} are retired", device=device, **values)


def _count(gpu: nvidia.Gpu, kind: str) -> int | None:
    try:
        return int(gpu.number("", f"retired_pages/{kind}_retirement/retired_count"))
    except nvidia.NotReported:
        return None
