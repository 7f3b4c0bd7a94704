"""First steps with the default settings: the loss must fall, and never rise above its first value.

    PYTHONPATH=src python3 benchmarks/first_steps.py                                     1B and 8B presets, 30 steps
    PYTHONPATH=src python3 benchmarks/first_steps.py --preset tiny-llama --device cpu    tries the script itself
    PYTHONPATH=src python3 benchmarks/first_steps.py --steps 12 --variant '' --variant 'optimizer.beta2=0.99'

Each run is made of the loop's own parts (data, forward and backward passes, clipping, AdamW, schedule), without
checkpoints. bf16 masters and 8192 tokens a sequence, so that the 8B preset fits on one GPU; two sequences for the 1B.

A variant is a list of KEY=JSON with commas between: fields of the config, and for experiments `warmup_power` (the
warm-up's share to this power), `eps` (of AdamW) and `scale NAME` (times the initial values of the weights of that name,
such as `scale head.weight`).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

PRESETS = {"llama3.2-1b": 2, "llama3.1-8b": 1}  # sequences a step
EXPERIMENTS = ("warmup_power", "eps", "scale ")
NOISE = 0.05  # two batches of the same untrained model differ by less


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", action="append", help="may be given several times")
    parser.add_argument("--steps", type=int, default=30, help="length of the run, which the schedule follows")
    parser.add_argument("--until", type=int, help="leave after this step")
    parser.add_argument("--sequence-tokens", type=int, default=8192)
    parser.add_argument("--variant", action="append", help="may be given several times")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    rose = 0
    for preset in options.preset or PRESETS:
        for variant in options.variant or [""]:
            rose += not _show(preset, variant, options)
    return 1 if rose else 0


def _show(preset: str, variant: str, options: argparse.Namespace) -> bool:
    """Print the losses of one run as they come; False if one of them is above the first."""
    begun = time.perf_counter()
    print(f"{preset} [{variant or 'defaults'}]", end=" ", flush=True)
    losses: list[float] = []
    for loss in _losses(preset, _parse(variant), options):
        print(f"{loss:.2f}", end=" ", flush=True)
        losses.append(loss)
    rise = max(losses) - losses[0]
    word = "falls" if rise <= NOISE else f"RISES by {rise:.2f}"
    print(f"| {word}, {losses[0]:.2f} to {losses[-1]:.2f}, {time.perf_counter() - begun:.0f} s", flush=True)
    return rise <= NOISE


def _losses(preset: str, variant: Mapping[str, Any], options: argparse.Namespace) -> Any:
    import torch

    from trainmaster.core.config.schedule import learning_rate
    from trainmaster.train.compute import build_model, forward_backward
    from trainmaster.train.feed import Feed
    from trainmaster.train.optimizer import build_optimizer, update
    from trainmaster.train.parallel import shard

    world = _world(options.device)
    config = _config(preset, variant, options)
    model = build_model(config, world, shard.pick_precision(config, world.device))
    _rescale(model, variant)
    optimizer = build_optimizer(model, config.optimizer)
    for group in optimizer.param_groups:
        group["eps"] = variant.get("eps", group["eps"])
    feed = Feed(config, world)
    for step in range(options.until or config.steps):
        cursor = step * config.batch_sequences
        feed.ready(cursor)
        loss = forward_backward(model, feed.take(cursor))
        lr = learning_rate(config.optimizer, step=step, steps=config.steps)
        if step < config.optimizer.warmup_steps and "warmup_power" in variant:
            lr = config.optimizer.lr * ((step + 1) / config.optimizer.warmup_steps) ** variant["warmup_power"]
        update(model, optimizer, loss=loss, lr=lr, grad_clip=config.optimizer.grad_clip)
        yield loss.item()
    feed.close()
    del model, optimizer, loss
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()


def _world(device: str) -> Any:
    import torch.distributed as dist

    from trainmaster.train.parallel import shard
    from trainmaster.train.parallel.rank_info import RankInfo

    info = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, nodes=1, master=None)
    if dist.is_initialized():
        return shard.World(rank_info=info, device=shard.pick_device(device, info))
    return shard.join(info, shard.pick_device(device, info), timeout_s=600)


def _config(preset: str, variant: Mapping[str, Any], options: argparse.Namespace) -> Any:
    from trainmaster.core.config.train import TrainConfig
    from trainmaster.core.schema import build

    mapping: dict[str, Any] = {
        "model": {"preset": preset},
        "parallel": {"compile": options.compile},
        "steps": options.steps,
        "batch_sequences": PRESETS.get(preset, 1),
        "sequence_tokens": options.sequence_tokens,
        "eval_sequences": 0,
        "master": "bf16",
        "device": options.device,
    }
    for key, value in variant.items():
        if key.startswith(EXPERIMENTS):
            continue
        *parents, name = key.split(".")
        place = mapping
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value
    return build(TrainConfig, mapping)


def _rescale(model: Any, variant: Mapping[str, Any]) -> None:
    import torch

    scales = {key.removeprefix("scale "): value for key, value in variant.items() if key.startswith("scale ")}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            for ending, scale in scales.items():
                if name == ending or name.endswith(f".{ending}"):
                    weight.mul_(scale)


def _parse(variant: str) -> Mapping[str, Any]:
    pairs = (part.partition("=") for part in variant.split(",") if part)
    return {key.strip(): json.loads(value) for key, _, value in pairs}


if __name__ == "__main__":
    sys.exit(main())
