"""Does `trainmaster plan` tell the truth: peak memory and tokens/s of real steps beside what was planned for them.

    PYTHONPATH=src python3 benchmarks/plan_check.py                    the cases below, on a GPU, in about four minutes
    PYTHONPATH=src python3 benchmarks/plan_check.py --only 1b          those whose name begins so
    PYTHONPATH=src python3 benchmarks/plan_check.py --config RUN.json  a config of your own
    PYTHONPATH=src python3 benchmarks/plan_check.py --cpu              tries the script itself on a tiny model

Each case is a process of its own, so that none inherits memory: the loop runs, a few steps warm it up (compiling takes
most of the time), then steps are timed. Nothing is saved. `--profile` adds where one step's time went, kernel by
kernel name, beside the plan's parts. Ends with 1 if memory is off by more than 10 % or speed by more than 15 %.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MEMORY_LIMIT, SPEED_LIMIT = 0.10, 0.15
LIMIT_S = 150  # of one case; one that hangs must not take the others' time

_1B, _8B = {"model": {"preset": "llama3.2-1b"}}, {"model": {"preset": "llama3.1-8b"}}
CASES: dict[str, dict[str, Any]] = {
    "1b fp32 masters, 4 × 4096": {**_1B, "batch_sequences": 4, "sequence_tokens": 4096},
    "1b bf16 masters, 2 × 8192": {**_1B, "batch_sequences": 2, "sequence_tokens": 8192, "master": "bf16"},
    "1b fp32 masters, 4 × 4 × 4096, ops": {
        **_1B, "batch_sequences": 16, "micro_sequences": 4, "sequence_tokens": 4096, "parallel": {"recompute": "ops"},
    },
    "8b bf16 masters, 1 × 8192": {**_8B, "batch_sequences": 1, "sequence_tokens": 8192, "master": "bf16"},
    "8b bf16 masters, 2 × 8192, full": {
        **_8B, "batch_sequences": 2, "sequence_tokens": 8192, "master": "bf16", "parallel": {"recompute": "full"},
    },
    "8b bf16 masters, 1 × 8192, float8": {
        **_8B, "batch_sequences": 1, "sequence_tokens": 8192, "master": "bf16", "parallel": {"float8": True},
    },
}  # fmt: skip
PROFILED = 2  # steps
TINY = {"model": {"layers": 2, "width": 32}, "batch_sequences": 2, "sequence_tokens": 32, "device": "cpu"}
# By the names that cuBLAS, cuDNN, inductor and torch give their kernels; the first that matches.
KINDS = {
    "update": r"adam|multi_tensor|lpnorm|foreach",
    "attention": r"cudnn|flash|fmha|sdpa|flex",
    "matrices": r"gemm|nvjet|cutlass|xmma|wgmma|splitk|scaled_mm",
    "element-wise": r"^triton",
    "copies": r"memcpy|memset|copy|cat|fill|split",
}


class Enough(Exception):
    """Everything has been measured."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Plan beside measurement.")
    parser.add_argument("--only", default="", help="cases whose name begins so")
    parser.add_argument("--config", type=Path, help="a training config as JSON, instead of the cases")
    parser.add_argument("--steps", type=int, default=8, help="steps that are timed")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="say which kinds of kernels took a step's time")
    parser.add_argument("--cpu", action="store_true", help="try the script itself")
    parser.add_argument("--json", type=Path, help="also write everything here")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # one case, in a process of its own
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(measure(json.loads(options.case), options)))
        return 0
    cases = {name: case for name, case in CASES.items() if name.startswith(options.only)}
    if options.config is not None:
        cases = {options.config.stem: json.loads(options.config.read_text())}
    if options.cpu:
        cases = {"tiny, on the CPU": TINY}
    rows = {name: run(case, options) for name, case in cases.items() if not print(f"# {name}", flush=True)}
    show(rows)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0 if rows and all(good(row) for row in rows.values()) else 1


def run(case: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    words = ["--steps", str(options.steps), "--warm-up", str(options.warm_up), *(["--profile"] * options.profile)]
    command = [sys.executable, __file__, "--case", json.dumps(case), *words]
    started = time.perf_counter()
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {LIMIT_S} s"}
    lines = ran.stdout.strip().splitlines()
    if ran.returncode or not lines:
        return {"error": ran.stderr.strip()[-1500:] or f"ended with {ran.returncode}"}
    row: dict[str, Any] = json.loads(lines[-1])
    return {**row, "took_s": round(time.perf_counter() - started, 1)}


def measure(case: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """This process as the one rank of the case."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    import torch

    from trainmaster.core import gpus
    from trainmaster.core.config.train import TrainConfig
    from trainmaster.core.schema import build
    from trainmaster.estimate import Cluster, estimate
    from trainmaster.train import loop
    from trainmaster.train.parallel import shard
    from trainmaster.train.parallel.rank_info import RankInfo
    from trainmaster.train.run_log import RunLog
    from trainmaster.train.watch.stop import Stop

    class Watch(RunLog):
        """Times steps by the events that end them, and leaves the loop after the last: nothing is saved."""

        started = ended = 0.0
        peak = reserved = None
        kinds: dict[str, float] | None = None
        profiler: Any = None

        def step_metrics(self, **data: Any) -> None:
            step, last = data["step"], options.warm_up + options.steps
            if step == options.warm_up:
                self.started = time.perf_counter()
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats()
            elif step == last:
                self.ended = time.perf_counter()
                if on_gpu:
                    self.peak, self.reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
                if not (options.profile and on_gpu):
                    raise Enough
                self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                self.profiler.start()
            elif step == last + PROFILED:
                self.profiler.stop()
                self.kinds = by_kind(self.profiler)
                raise Enough

    # Every step ends in an event, and none in a save or an evaluation before we have left.
    steps = 100 * (options.warm_up + options.steps)
    quiet = {"steps": steps, "epoch_steps": steps, "eval_sequences": 0, "checkpoint": {"every_steps": steps}}
    config = build(TrainConfig, {**quiet, **case, "log_every_steps": 1})
    rank_info = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, nodes=1, master=None)
    device = shard.pick_device(config.device, rank_info)
    world = shard.join(rank_info, device, timeout_s=120)
    on_gpu = device.type == "cuda"
    watch = Watch(rank_info, None)
    quiet_out, enough = contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Enough)
    with tempfile.TemporaryDirectory() as folder, quiet_out, enough:
        loop.run(config, world, folder=Path(folder), stop=Stop(None), run_log=watch)
    step_s = (watch.ended - watch.started) / options.steps
    gpu = gpus.of_gpu(torch.cuda.get_device_name()) if on_gpu else None
    plan = estimate(config, Cluster(gpu=gpu, gpus=1, gpus_per_node=1))
    return {
        "device": world.device_name,
        "torch": torch.__version__,
        "measured": {
            "peak_bytes": watch.peak,
            "reserved_bytes": watch.reserved,
            "step_s": step_s,
            "tokens_per_s": config.batch_sequences * config.sequence_tokens / step_s,
            "kinds_s": watch.kinds,
        },
        "planned": {
            "peak_bytes": plan.memory.peak,
            "moment": plan.memory.moment,
            "parts_bytes": dict(plan.memory.parts),
            "tokens_per_s": plan.speed.tokens_per_s if plan.speed is not None else None,
            "mfu": plan.speed.mfu if plan.speed is not None else None,
            "step_s": plan.speed.step_s if plan.speed is not None else None,
            "parts_s": dict(plan.speed.parts) if plan.speed is not None else None,
        },
    }


def by_kind(profiler: Any) -> dict[str, float]:
    """Seconds of one step by kind of kernel; kernels that run beside each other count twice."""
    total: collections.Counter[str] = collections.Counter()
    for event in profiler.key_averages():
        kind = next((kind for kind, names in KINDS.items() if re.search(names, event.key, re.IGNORECASE)), "other")
        total[kind] += event.self_device_time_total / 1e6 / PROFILED
    return dict(total)


def good(row: dict[str, Any]) -> bool:
    memory, speed = ratios(row)
    return (
        "error" not in row
        and (memory is None or abs(memory - 1) <= MEMORY_LIMIT)
        and (speed is None or abs(speed - 1) <= SPEED_LIMIT)
    )


def ratios(row: dict[str, Any]) -> tuple[float | None, float | None]:
    """Planned over measured."""
    if "error" in row:
        return None, None
    planned, measured = row["planned"], row["measured"]
    memory = planned["peak_bytes"] / measured["peak_bytes"] if measured["peak_bytes"] else None
    speed = planned["tokens_per_s"] / measured["tokens_per_s"] if planned["tokens_per_s"] else None
    return memory, speed


def show(rows: dict[str, dict[str, Any]]) -> None:
    device = next((f"{row['device']}, torch {row['torch']}" for row in rows.values() if "device" in row), "")
    print(f"\n{device}; ratio: planned over measured")
    print(f"{'case':38} {'GiB':>7} {'plan':>7} {'ratio':>6} {'tokens/s':>9} {'plan':>9} {'ratio':>6} {'took':>6}")
    for name, row in rows.items():
        if "error" in row:
            print(f"{name:38} {row['error']}")
            continue
        memory, speed = ratios(row)
        measured, planned = row["measured"], row["planned"]
        print(
            f"{name:38} {_gib(measured['peak_bytes']):>7} {_gib(planned['peak_bytes']):>7} {_ratio(memory):>6} "
            f"{measured['tokens_per_s']:9,.0f} {_number(planned['tokens_per_s']):>9} {_ratio(speed):>6} "
            f"{row['took_s']:5.0f}s{'' if good(row) else '  OFF'}"
        )
        if measured["kinds_s"]:
            print(f"    measured ms {_milliseconds(measured['kinds_s'])}")
            print(f"    planned  ms {_milliseconds(planned['parts_s'])}")


def _gib(size: int | None) -> str:
    return f"{size / 2**30:.1f}" if size else "–"


def _ratio(value: float | None) -> str:
    return f"{value:.3f}" if value is not None else "–"


def _number(value: float | None) -> str:
    return f"{value:,.0f}" if value is not None else "–"


def _milliseconds(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in parts.items())


if __name__ == "__main__":
    sys.exit(main())
