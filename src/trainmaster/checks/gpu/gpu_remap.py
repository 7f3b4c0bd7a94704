"""No memory row is pending a remap and no remap failed. The next error in such a row ends the job."""

from __future__ import annotations

from trainmaster.checks import nvidia
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok, skip, warn

LEVEL = 1
GPU = True
EXPECTS = ()
COMPARES = ()
METRICS: dict[str, str] = {}
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
PENDING = "remapped_rows/remapped_row_pending"
FAILURE = "remapped_rows/remapped_row_failure"
PAGES = ("retired_pages/pending_retirement", "retired_pages/pending_blacklist")
HISTOGRAM = "remapped_rows/row_remapper_histogram"
SPENT = f"{HISTOGRAM}/row_remapper_histogram_none"
LOW = f"{HISTOGRAM}/row_remapper_histogram_low"
MOST_ROWS = 512  # a GPU can remap no more (NVIDIA, GPU Memory Error Management, Row Remapping)

read = nvidia.read


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    return nvidia.judge_each(gpus, expect, lambda gpu, device: _judge_one(gpu, device, gpus))


def _judge_one(gpu: nvidia.Gpu, device: str, gpus: nvidia.Gpus) -> Finding:
    # A fault is judged before a value that is missing.
    if gpu.text(FAILURE) == "Yes":
        return fail("a memory row could not be remapped", action=nvidia.REPLACE, device=device, failed=True)
    if gpu.text(PENDING) == "Yes":
        return fail("a memory row is pending a remap", action=nvidia.RESET, device=device, pending=True)
    # Driver 450 to 515 have no histogram; where it is, it must hold a number.
    banks, low = (gpu.find_number(" bank(s)", path) for path in (SPENT, LOW))
    if banks or low:
        reason = f"{banks or 0:g} memory banks have no spare row left, {low or 0:g} have few"
        return warn(reason, action="plan to have the GPU replaced", device=device)
    known = [gpu.find_number("", f"remapped_rows/remapped_row_{name}") or 0 for name in ("corr", "unc")]
    if sum(known) >= MOST_ROWS:
        reason = f"{sum(known):g} rows are remapped, and a GPU can remap {MOST_ROWS}"
        return warn(reason, action="plan to have the GPU replaced", device=device)
    if not gpu.reports(PENDING) and not nvidia.peers_report(gpus, gpu, PENDING):
        proof = _no_rows(gpu)
        if proof is not None:
            return skip("it does not remap rows", proof=proof, device=device)
    pending, failed = gpu.yes(PENDING), gpu.yes(FAILURE)
    corrected, hard = (int(gpu.number("", f"remapped_rows/remapped_row_{name}")) for name in ("corr", "unc"))
    values = {"pending": pending, "failed": failed, "corrected": corrected, "uncorrectable": hard}
    for path in (SPENT, LOW):
        if gpu.text(path) or any(leaf.startswith(HISTOGRAM) for leaf in gpu.leaves):
            gpu.number(" bank(s)", path)  # the banks are counted together: one without the others is damage
    return ok(f"no remap is pending; {corrected + hard} rows are remapped", device=device, **values)


def _no_rows(gpu: nvidia.Gpu) -> str | None:
    """What shows that a GPU does not remap rows."""
    generation = nvidia.generation(gpu)
    if generation in nvidia.RETIRES_PAGES:
        return f"its generation is {generation}"
    if gpu.reports(*PAGES):
        return f"it retires pages instead: pending {gpu.text(*PAGES)}"
    if nvidia.mig_on(gpu) and gpu.text(PENDING) in ("", "N/A"):
        return "MIG is Enabled, and the driver reports remapped rows of whole GPUs only"
    return f"it is a {gpu.name}" if nvidia.is_desktop(gpu) else None
