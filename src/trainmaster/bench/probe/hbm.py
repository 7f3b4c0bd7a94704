"""How fast a GPU's memory is: a copy (reads one, writes one) and a triad (reads two, writes one), all bytes counted."""

from __future__ import annotations

import torch

from trainmaster.bench.probe._run import Run
from trainmaster.bench.probe._timing import rates, time_rounds

DEADLINE_S = 80.0
MOST_BYTES = 4 << 30  # of one buffer
CACHES = 8  # a buffer is at least this many times the last cache, or the cache is measured


def measure(run: Run) -> None:
    run.step("allocation")
    size = min(MOST_BYTES, run.free_bytes() // 5) >> 20 << 20
    if size < CACHES * run.l2_bytes() or not size:
        raise RuntimeError(f"{run.free_bytes() >> 20} MiB free are too few to measure memory beyond the cache")
    count = size // 4
    # Small whole numbers and a power of two: every step is exact, so the triad can be undone and compared.
    source = torch.randint(-1000, 1000, (count,), dtype=torch.int32, device=run.device).float()
    other = torch.randint(-1000, 1000, (count,), dtype=torch.int32, device=run.device).float()
    target = torch.full_like(source, float("nan"))  # what is not written shows
    run.results["buffer_bytes"] = size
    run.step("timing")
    timed = time_rounds(
        run.device,
        {"copy": lambda: target.copy_(source), "triad": lambda: torch.add(source, other, alpha=4.0, out=target)},
    )
    run.results["copy"] = rates(timed["copy"], 2 * size / 1e9)
    run.results["triad"] = rates(timed["triad"], 3 * size / 1e9)
    run.step("comparing the triad")
    torch.add(source, other, alpha=4.0, out=target)
    target.sub_(source).mul_(0.25)
    run.results["triad_wrong"] = int((target != other).sum().item())
    run.step("comparing the copy")
    target.fill_(float("nan"))
    target.copy_(source)
    run.results["copy_wrong"] = int((target != source).sum().item())
