"""A GPU can be started at all: a context, memory, a kernel, and the right answer from it."""

from __future__ import annotations

import time

import torch

from trainmaster.bench.probe._run import Run, wait

DEADLINE_S = 100.0  # 8 GPUs without persistence mode are woken one after the other, a few seconds each
COUNT = 1 << 20


def measure(run: Run) -> None:
    run.step("first allocation")
    started = time.perf_counter()
    numbers = torch.arange(COUNT, dtype=torch.int64, device=run.device)
    wait(run.device)
    run.results["allocation_s"] = round(time.perf_counter() - started, 3)
    run.step("first kernel")
    started = time.perf_counter()
    total = int((numbers * 3 + 1).sum().item())
    run.results["kernel_s"] = round(time.perf_counter() - started, 3)
    run.results["sum"] = total
    run.results["sum_expected"] = 3 * (COUNT * (COUNT - 1) // 2) + COUNT
    run.step("copy back")
    back = numbers.cpu()
    run.results["copied_back"] = bool(torch.equal(back, torch.arange(COUNT, dtype=torch.int64)))
    # What this torch was built for. A GPU it does not know runs compiled-on-the-fly code, or none.
    run.results["built_for"] = torch.cuda.get_arch_list() if run.on_gpu else []
