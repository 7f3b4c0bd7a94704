"""How fast does it train: our whole loop beside HF transformers, on the same GPU, in the same run and precision.

    PYTHONPATH=src python3 benchmarks/train_gpu.py                            every case
    PYTHONPATH=src python3 benchmarks/train_gpu.py --case 1b-8k --steps 10    one of them, with few steps
    PYTHONPATH=src python3 benchmarks/train_gpu.py --settings                 speed and peak memory by setting
    PYTHONPATH=src python3 benchmarks/train_gpu.py --case tiny --device cpu --steps 2    tries the script itself

Ours is loop.run as a job would run it: data, clipping, logging, checkpoints asked for at every step (none is due within
the timed steps). HF is LlamaForCausalLM with its own loss, SDPA attention, compiled, bf16, fused AdamW and clipping, on
one batch that stays on the GPU. It keeps all activations, and checkpoints them only where they do not fit. Every run is
a process of its own. MFU: 6·(parameters less an untied embedding) + 12·layers·width·sequence per token, against the
datasheet's 989 TFLOPS.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

PEAK_FLOPS = 989e12  # dense bf16 of an H100 or H200 SXM, as reference figures count
WARM_STEPS = 4  # compile, first allocations, clocks


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape and precision; `targets` are (MFU, ratio to HF)."""

    preset: str
    sequence: int
    batch: int
    master: str = "bf16"
    parallel: Mapping[str, Any] = field(default_factory=dict)
    micro: int | None = None
    beside: str | None = "hf"  # or the name of the case it is compared with
    target: str = ""


CASES = {
    "1b-8k": Case(preset="llama3.2-1b", sequence=8192, batch=2, target=">= 58% and 1.30x HF"),
    "8b-8k": Case(preset="llama3.1-8b", sequence=8192, batch=1, target=">= 58% and 1.5x HF"),
    "8b-8k-2": Case(preset="llama3.1-8b", sequence=8192, batch=2, target="1.5x HF"),
    "1b-fp32": Case(preset="llama3.2-1b", sequence=4096, batch=4, master="fp32", target=">= 54%"),
    "8b-float8": Case(
        preset="llama3.1-8b",
        sequence=8192,
        batch=1,
        parallel={"float8": True},
        beside="8b-8k",
        target=">= 1.15x our bf16",
    ),
    "tiny": Case(preset="tiny-llama", sequence=64, batch=2, target="none: it tries the script"),
}
USUAL = ("1b-8k", "8b-8k", "1b-fp32", "8b-float8")
# Case, sequences at once, recompute, master: what a planner of memory is held against.
SETTINGS = [
    ("8b-8k", 1, "none", "bf16"),
    ("8b-8k", 2, "none", "bf16"),
    ("8b-8k", 2, "ops", "bf16"),
    ("8b-8k", 1, "full", "bf16"),
    ("1b-8k", 2, "none", "bf16"),
    ("1b-8k", 2, "ops", "bf16"),
    ("1b-8k", 2, "full", "bf16"),
    ("1b-8k", 2, "none", "fp32"),
    ("1b-8k", 4, "none", "bf16"),
    ("1b-8k", 1, "none", "bf16"),
    ("8b-8k", 4, "full", "bf16"),
    ("8b-8k", 1, "ops", "bf16"),
    ("1b-8k", 4, "full", "fp32"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="may be given several times")
    parser.add_argument("--steps", type=int, default=12, help="timed steps, after the first four")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=("ours", "hf"), help="one side alone")
    parser.add_argument("--settings", action="store_true", help="peak memory and speed by setting, in one process")
    parser.add_argument("--limit-s", type=float, default=240.0, help="for one process")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="change a field of the case")
    parser.add_argument("--side", choices=("ours", "hf"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        case = json.loads(sys.stdin.read())
        (run_ours if options.side == "ours" else run_hf)(Case(**case), steps=options.steps, device=options.device)
        return 0
    changes = {name: json.loads(value) for name, _, value in (text.partition("=") for text in options.set)}
    if options.settings:
        return show(run_settings(options.case or USUAL, steps=options.steps, device=options.device))
    return show(compare(options.case or USUAL, changes, options))


def compare(names: Any, changes: Mapping[str, Any], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Ours, then what it is held against, right after it."""
    speed: dict[str, float] = {}
    for name in names:
        if options.only != "hf":
            row = _measure(name, "ours", changes, options)
            speed[name] = row.get("tokens_per_s", 0.0)
            beside = CASES[name].beside
            if beside is not None and speed.get(beside):
                row["ratio"] = row.get("tokens_per_s", 0.0) / speed[beside]
            yield row
        if options.only != "ours" and CASES[name].beside == "hf":
            row = _measure(name, "hf", changes, options)
            if speed.get(name) and row.get("tokens_per_s"):
                row["ratio"] = speed[name] / row["tokens_per_s"]
            yield row


def show(rows: Iterator[dict[str, Any]]) -> int:
    """The table, a row as soon as it is there; 1 if one could not be measured."""
    missing = 0
    head = ("case", "side", "setting", "tokens/s", "MFU", "peak GiB", "ratio", "target")
    print(("{:10} {:5} {:62} {:>9} {:>6} {:>8} {:>6}  {}").format(*head), flush=True)
    for row in rows:
        if "error" in row:
            missing += 1
            print(f"{row['case']:10} {row['side']:5} {row['setting']:62} {row['error']}", flush=True)
            continue
        ratio = f"{row['ratio']:.2f}x" if "ratio" in row else ""
        print(
            f"{row['case']:10} {row['side']:5} {row['setting']:62} {row['tokens_per_s']:9,.0f} {row['mfu']:6.1%} "
            f"{row['peak_gib']:8.1f} {ratio:>6}  {row['target'] if row['side'] == 'ours' else ''}",
            flush=True,
        )
    return 1 if missing else 0


def _measure(name: str, side: str, changes: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """One case on one side, in a process of its own: what is left in memory by one must not lie in another's way."""
    case = {**CASES[name].__dict__, **changes}
    words = [f"{case['batch']} x {case['sequence']}", f"master {case['master']}"]
    words += [f"{key} {value}" for key, value in case["parallel"].items()] if side == "ours" else []
    words += [f"micro {case['micro']}"] if case["micro"] else []
    row = {"case": name, "side": side, "setting": ", ".join(words), "target": case["target"]}
    command = [sys.executable, __file__, "--side", side, "--steps", str(options.steps), "--device", options.device]
    # Both sides: without it the last gigabytes are lost between blocks of other sizes.
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            input=json.dumps(case),
            capture_output=True,
            text=True,
            timeout=options.limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {**row, "error": f"not done in {options.limit_s:.0f} s"}
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        last = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()][-1:] or ["no output"]
        oom = [line for line in done.stderr.splitlines() if "out of memory" in line][-1:]
        return {**row, "error": (oom or last)[0][:150]}
    result = json.loads(found[-1].removeprefix("RESULT "))
    row["setting"] += result.pop("note", "")
    return {**row, **result}


def run_ours(case: Case, *, steps: int, device: str) -> None:
    """The loop as a job runs it, left when enough steps were told."""
    import torch

    from trainmaster.node.emit import Emitter
    from trainmaster.train import loop
    from trainmaster.train.parallel import shard
    from trainmaster.train.parallel.rank_info import RankInfo
    from trainmaster.train.run_log import RunLog
    from trainmaster.train.watch.stop import Stop

    config = _config(case, device)
    rank_info = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, nodes=1, master=None)
    world = shard.join(rank_info, shard.pick_device(device, rank_info), timeout_s=600)
    folder = Path(tempfile.mkdtemp())

    class Enough(RunLog):
        """Every step is told; after the last that is wanted the process ends, before a 48 GB checkpoint is written."""

        at: ClassVar[list[float]] = []

        def step_metrics(self, **data: Any) -> None:
            super().step_metrics(**data)
            self.at.append(time.perf_counter())
            if len(self.at) == WARM_STEPS + steps:
                peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
                tokens = case.batch * case.sequence
                result = _result(case, config.model, tokens=tokens, times=self.at, peak_bytes=peak)
                print("RESULT " + json.dumps(result), flush=True)
                os._exit(0)

    with Emitter(folder / "events.jsonl") as emitter:
        loop.run(config, world, folder=folder / "checkpoints", stop=Stop(None), run_log=Enough(rank_info, emitter))


def run_settings(names: Any, *, steps: int, device: str) -> Iterator[dict[str, Any]]:
    """The step of the loop alone, one setting after the other; compiled kernels are found again."""
    import torch

    from trainmaster.train.parallel import shard
    from trainmaster.train.parallel.rank_info import RankInfo

    rank_info = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, nodes=1, master=None)
    world = shard.join(rank_info, shard.pick_device(device, rank_info), timeout_s=600)
    for name, batch, recompute, master in SETTINGS:
        if name not in names:
            continue
        case = replace(CASES[name], batch=batch, master=master, parallel={"recompute": recompute})
        words = f"{batch} x {case.sequence}, master {master}, recompute {recompute}"
        row = {"case": name, "side": "ours", "setting": words, "target": ""}
        try:
            row |= _time_steps(case, world, steps=steps)
        except torch.OutOfMemoryError:
            row["error"] = "out of memory"
        gc.collect()
        torch._dynamo.reset()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        yield row


def _time_steps(case: Case, world: Any, *, steps: int) -> dict[str, Any]:
    import torch

    from trainmaster.train.compute import build_model, forward_backward
    from trainmaster.train.feed import Batch
    from trainmaster.train.optimizer import build_optimizer, update
    from trainmaster.train.parallel import shard

    config = _config(case, world.device.type)
    model = build_model(config, world, shard.pick_precision(config, world.device))
    optimizer = build_optimizer(model, config.optimizer)
    rows = torch.randint(0, config.model.vocab, (case.batch, case.sequence + 1), device=world.device)
    times = []
    for _ in range(WARM_STEPS + steps):
        loss = forward_backward(model, [Batch(tokens=rows[:, :-1], targets=rows[:, 1:])])
        norm, _ = update(model, optimizer, loss=loss, lr=1e-5, grad_clip=1.0)
        norm.item()  # waits for the device
        times.append(time.perf_counter())
    peak = torch.cuda.max_memory_allocated() if world.device.type == "cuda" else 0
    return _result(case, config.model, tokens=case.batch * case.sequence, times=times, peak_bytes=peak)


def run_hf(case: Case, *, steps: int, device: str) -> None:
    """transformers at its best: without activation checkpointing where that fits."""
    import torch

    times, note = [], ""
    with contextlib.suppress(torch.OutOfMemoryError):
        times = _train_hf(case, steps=steps, device=device, recompute=False)
    if not times:
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        times, note = _train_hf(case, steps=steps, device=device, recompute=True), ", recompute full (else no room)"
    from trainmaster.core.schema import build
    from trainmaster.core.train_config import ModelConfig

    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    model = build(ModelConfig, {"preset": case.preset})
    result = _result(case, model, tokens=case.batch * case.sequence, times=times, peak_bytes=peak)
    print("RESULT " + json.dumps({**result, "note": note}), flush=True)


def _train_hf(case: Case, *, steps: int, device: str, recompute: bool) -> list[float]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainmaster.core.schema import build
    from trainmaster.core.train_config import ModelConfig
    from trainmaster.models.hf_config import to_hf

    plain = dict(to_hf(build(ModelConfig, {"preset": case.preset}), dtype="bfloat16"))
    config = AutoConfig.for_model(plain.pop("model_type"), **{**plain, "use_cache": False})
    dtype = torch.bfloat16 if case.master == "bf16" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.train()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(0, config.vocab_size, (case.batch, case.sequence), device=device)
    times = []
    for _ in range(WARM_STEPS + steps):
        with torch.autocast(device, torch.bfloat16, enabled=case.master == "fp32"):
            loss = compiled(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if len(times) in (WARM_STEPS - 1, WARM_STEPS + steps - 1) and device == "cuda":
            torch.cuda.synchronize()  # only where the clock is read
        times.append(time.perf_counter())
    return times


def _config(case: Case, device: str) -> Any:
    from trainmaster.core.schema import build
    from trainmaster.core.train_config import TrainConfig

    far = 1_000_000  # nothing but steps within the timed ones
    return build(
        TrainConfig,
        {
            "model": {"preset": case.preset},
            "optimizer": {"lr": 1e-5},
            "checkpoint": {"every_steps": far},
            "parallel": dict(case.parallel),
            "steps": far,
            "epoch_steps": far,
            "batch_sequences": case.batch,
            "micro_sequences": case.micro,
            "sequence_tokens": case.sequence,
            "eval_sequences": 0,
            "master": case.master,
            "device": device,
        },
    )


def _result(case: Case, model: Any, *, tokens: int, times: list[float], peak_bytes: int) -> dict[str, Any]:
    from math import prod

    from trainmaster.models.llama import flops_per_token, weight_shapes

    spent = times[-1] - times[WARM_STEPS - 1]
    speed = tokens * (len(times) - WARM_STEPS) / spent
    parameters = sum(map(prod, weight_shapes(model).values()))
    flops = flops_per_token(model, parameters=parameters, sequence_tokens=case.sequence)
    return {"tokens_per_s": speed, "mfu": speed * flops / PEAK_FLOPS, "peak_gib": peak_bytes / 2**30}


if __name__ == "__main__":
    sys.exit(main())
