"""Training speed: our whole loop beside its peers, on the same GPU, in the same run and precision.

    PYTHONPATH=src python3 benchmarks/train_gpu.py                            every case
    PYTHONPATH=src python3 benchmarks/train_gpu.py --case 1b-8k --steps 10    one of them, with few steps
    PYTHONPATH=src python3 benchmarks/train_gpu.py --settings                 speed and peak memory by setting
    PYTHONPATH=src python3 benchmarks/train_gpu.py --case tiny --device cpu --steps 2    tries the script itself

Ours is loop.run as a job would run it: data, clipping, logging, checkpoints asked for at every step (none is due within
the timed steps). The peers get fused AdamW, clipping, and one batch that stays on the GPU; they keep all activations,
and checkpoint them only where they do not fit:
  hf      LlamaForCausalLM with its own loss and SDPA attention, compiled
  liger   the same with Liger's kernels (pip install liger-kernel), eager and compiled; the faster counts
  titan   torchtitan's Llama 3 (pip install --no-deps torchtitan==0.2.2): each block and the loss compiled, as its
          trainer does on one GPU
A peer whose package is missing gets the row "not installed". Every run is a process of its own. MFU: 6·(parameters
less an untied embedding) + 12·layers·width·sequence per token, against the datasheet's 989 TFLOPS.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
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
    model: Mapping[str, Any] = field(default_factory=dict)  # fields beside the preset
    beside: str | None = "peers"  # or the name of the case it is compared with
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
    "1b-offload": Case(
        preset="llama3.2-1b", sequence=4096, batch=4, master="fp32", parallel={"cpu_offload": True}, beside="1b-fp32"
    ),
    # Weights, gradients and optimizer states: 120 GiB of the host's memory.
    "8b-offload": Case(
        preset="llama3.1-8b", sequence=8192, batch=1, master="fp32", parallel={"cpu_offload": True}, beside=None
    ),
    "7b-window": Case(preset="mistral-7b", sequence=16384, batch=1, beside=None),
    "moe": Case(preset="mixtral-8x7b", model={"layers": 4}, sequence=8192, batch=1, beside=None),
    "olmo2-7b": Case(preset="olmo2-7b", sequence=4096, batch=2, beside=None),
    "tiny": Case(preset="tiny-llama", sequence=64, batch=2, target="none: it tries the script"),
}
USUAL = ("1b-8k", "8b-8k", "1b-fp32", "8b-float8", "1b-offload", "7b-window", "moe")
PEERS = ("hf", "liger", "titan")
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
    parser.add_argument("--only", choices=("ours", *PEERS), help="one side alone")
    parser.add_argument("--settings", action="store_true", help="peak memory and speed by setting, in one process")
    parser.add_argument("--limit-s", type=float, default=240.0, help="for one process")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="change a field of the case")
    parser.add_argument("--side", choices=("ours", *PEERS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        case = json.loads(sys.stdin.read())
        if options.side == "ours":
            run_ours(Case(**case), steps=options.steps, device=options.device)
        else:
            run_peer(Case(**case), options.side, steps=options.steps, device=options.device)
        return 0
    changes = {name: json.loads(value) for name, _, value in (text.partition("=") for text in options.set)}
    if options.settings:
        return show(run_settings(options.case or USUAL, steps=options.steps, device=options.device))
    return show(compare(options.case or USUAL, changes, options))


def compare(names: Any, changes: Mapping[str, Any], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Ours, then what it is held against, right after it."""
    speed: dict[str, float] = {}
    for name in names:
        if options.only in (None, "ours"):
            row = _measure(name, "ours", changes, options)
            speed[name] = row.get("tokens_per_s", 0.0)
            beside = CASES[name].beside
            if beside is not None and speed.get(beside):
                row["ratio"] = row.get("tokens_per_s", 0.0) / speed[beside]
            yield row
        for peer in PEERS if CASES[name].beside == "peers" else ():
            if options.only not in (None, peer):
                continue
            row = _measure(name, peer, changes, options)
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
            missing += not row["error"].startswith("not installed")
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
    if "missing" in result:
        return {**row, "error": f"not installed: {result['missing']}"}
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


def run_peer(case: Case, side: str, *, steps: int, device: str) -> None:
    """A peer at its best: without activation checkpointing where that fits, and the faster of its ways to run."""
    ways: list[Callable[..., list[float]]] = {
        "hf": [partial(_train_hf, liger=False, compiled=True)],
        "liger": [partial(_train_hf, liger=True, compiled=False), partial(_train_hf, liger=True, compiled=True)],
        "titan": [_train_titan],
    }[side]
    found, trouble = [], ""
    for way in ways:
        try:
            found.append(_try_way(way, case, steps=steps, device=device))
        except ImportError as wrong:
            print("RESULT " + json.dumps({"missing": str(wrong)}), flush=True)
            return
        except Exception as wrong:  # a peer that cannot be compiled may still run eagerly
            trouble = f"{type(wrong).__name__}: {str(wrong).splitlines()[0] if str(wrong) else ''}"
    if not found:
        raise SystemExit(trouble)
    print("RESULT " + json.dumps(max(found, key=lambda result: result["tokens_per_s"])), flush=True)


def _try_way(way: Callable[..., list[float]], case: Case, *, steps: int, device: str) -> dict[str, Any]:
    import torch

    from trainmaster.core.config.train import ModelConfig
    from trainmaster.core.schema import build

    times, note = [], ""
    with contextlib.suppress(torch.OutOfMemoryError):
        times = way(case, steps=steps, device=device, recompute=False)
    if not times:
        _clear(device)
        times, note = way(case, steps=steps, device=device, recompute=True), ", recompute full (else no room)"
    if isinstance(way, partial) and way.keywords["liger"]:
        note += ", compiled" if way.keywords["compiled"] else ", eager"
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    model = build(ModelConfig, {"preset": case.preset, **case.model})
    result = _result(case, model, tokens=case.batch * case.sequence, times=times, peak_bytes=peak)
    _clear(device)
    return {**result, "note": note}


def _clear(device: str) -> None:
    import torch

    gc.collect()
    torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _train_hf(case: Case, *, steps: int, device: str, recompute: bool, liger: bool, compiled: bool) -> list[float]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainmaster.core.config.train import ModelConfig
    from trainmaster.core.schema import build
    from trainmaster.models.hf_config import to_hf

    kind: Any = AutoModelForCausalLM
    if liger:
        from liger_kernel.transformers import AutoLigerKernelForCausalLM

        kind = AutoLigerKernelForCausalLM
    plain = dict(to_hf(build(ModelConfig, {"preset": case.preset, **case.model}), dtype="bfloat16"))
    config = AutoConfig.for_model(plain.pop("model_type"), **{**plain, "use_cache": False})
    dtype = torch.bfloat16 if case.master == "bf16" else torch.float32
    with torch.device(device):
        model = kind.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.train()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    run = torch.compile(model) if compiled else model
    tokens = torch.randint(0, config.vocab_size, (case.batch, case.sequence), device=device)

    def loss() -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=case.master == "fp32"):
            return run(input_ids=tokens, labels=tokens, use_cache=False).loss

    return _time_peer(model, loss, steps=steps, device=device)


def _train_titan(case: Case, *, steps: int, device: str, recompute: bool) -> list[float]:
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    from trainmaster.core.config.train import ModelConfig
    from trainmaster.core.schema import build

    config = build(ModelConfig, {"preset": case.preset, **case.model})
    model_module, args_module = _titan_modules()
    args = args_module.TransformerModelArgs(
        dim=config.width, n_layers=config.layers, n_heads=config.heads, n_kv_heads=config.kv_heads,
        vocab_size=config.vocab, multiple_of=1, norm_eps=config.norm_eps, rope_theta=config.rope_theta,
        # Its hidden size is this share of 8/3 of the width.
        ffn_dim_multiplier=(config.ffn_width + 0.5) / int(8 * config.width / 3), max_seq_len=case.sequence,
    )  # fmt: skip
    with torch.device(device):
        model = model_module.Transformer(args)
        with torch.no_grad():
            model.init_weights()
    assert model.layers["0"].feed_forward.w1.weight.shape[0] == config.ffn_width
    if config.tied:
        model.output.weight = model.tok_embeddings.weight
    if case.master == "bf16":
        for weight in model.parameters():  # not the complex rotary table
            weight.data = weight.data.to(torch.bfloat16)
    for name, block in list(model.layers.named_children()):
        kept = checkpoint_wrapper(block, preserve_rng_state=False) if recompute else block
        model.layers.register_module(name, torch.compile(kept, fullgraph=True))
    judge = torch.compile(
        lambda logits, targets: torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))
    )
    rows = torch.randint(0, config.vocab, (case.batch, case.sequence + 1), device=device)

    def loss() -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=case.master == "fp32"):
            return judge(model(rows[:, :-1].contiguous()), rows[:, 1:].contiguous())

    return _time_peer(model, loss, steps=steps, device=device)


def _titan_modules() -> tuple[Any, Any]:
    """torchtitan's model file without its trainer, whose many packages a GPU machine need not have."""
    import torch

    root = importlib.util.find_spec("torchtitan")
    if root is None or not root.submodule_search_locations:
        raise ImportError("torchtitan")
    folder = Path(next(iter(root.submodule_search_locations)))

    class ModelProtocol(torch.nn.Module):
        def __init__(self, _args: Any) -> None:
            super().__init__()

    for name, path, contents in (
        ("torchtitan", folder, {}),
        ("torchtitan.models", folder / "models", {}),
        ("torchtitan.models.llama3", folder / "models" / "llama3", {}),
        ("torchtitan.config", None, {"JobConfig": object}),
        ("torchtitan.components", folder / "components", {}),
        ("torchtitan.components.tokenizer", None, {"BaseTokenizer": object}),
        ("torchtitan.protocols", folder / "protocols", {}),
        ("torchtitan.protocols.model", None, {"AttentionMasksType": Any, "BaseModelArgs": object}),
        ("torchtitan.protocols.train_spec", None, {"ModelProtocol": ModelProtocol}),
    ):
        module = types.ModuleType(name)
        if path is not None:
            module.__path__ = [str(path)]
        vars(module).update(contents)
        sys.modules[name] = module
    words = "torchtitan.models.llama3.model"
    return importlib.import_module(f"{words}.model"), importlib.import_module(f"{words}.args")


def _time_peer(model: Any, loss: Callable[[], Any], *, steps: int, device: str) -> list[float]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    times: list[float] = []
    for _ in range(WARM_STEPS + steps):
        loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if len(times) in (WARM_STEPS - 1, WARM_STEPS + steps - 1) and device == "cuda":
            torch.cuda.synchronize()  # only where the clock is read
        times.append(time.perf_counter())
    return times


def _config(case: Case, device: str) -> Any:
    from trainmaster.core.config.train import TrainConfig
    from trainmaster.core.schema import build

    far = 1_000_000  # nothing but steps within the timed ones
    return build(
        TrainConfig,
        {
            "model": {"preset": case.preset, **case.model},
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
    from trainmaster.models import family

    spent = times[-1] - times[WARM_STEPS - 1]
    speed = tokens * (len(times) - WARM_STEPS) / spent
    flops = family.of(model).flops_per_token(model, sequence_tokens=case.sequence)
    return {"tokens_per_s": speed, "mfu": speed * flops / PEAK_FLOPS, "peak_gib": peak_bytes / 2**30}


if __name__ == "__main__":
    sys.exit(main())
