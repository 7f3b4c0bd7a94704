"""No other program computes on the GPUs. It would take memory and time from the job, or make it run out of memory."""

from __future__ import annotations

from trainmaster.checks import nvidia
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, ok, warn

LEVEL = 1
GPU = True
EXPECTS = ()
COMPARES = ()
METRICS: dict[str, str] = {}
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S

read = nvidia.read


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    return nvidia.judge_each(gpus, expect, _judge_one)


def _judge_one(gpu: nvidia.Gpu, device: str) -> Finding:
    # Graphics (G) is a display. A container may not see other processes: gpu_memory then shows their memory.
    foreign = [process for process in gpu.processes if "C" in process.kind.upper() or process.kind == "unknown"]
    if not foreign:
        return ok("no process computes on it", device=device, processes=len(gpu.processes))
    first = foreign[0]
    more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
    return warn(
        f"{first.name[:80]} (pid {first.pid}) computes on it with {first.memory}{more}",
        action=f"end process {first.pid}, or wait for it",
        device=device,
        processes=[
            {"pid": process.pid, "name": process.name[:200], "memory": process.memory} for process in foreign[:20]
        ],
    )
