"""The report of `trainmaster plan`: one mapping, printed as JSON or as tables. docs/how/plan.md has its fields."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trainmaster.core import gpus
from trainmaster.core.config import default_lr
from trainmaster.core.config.schedule import learning_rate
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.gpus import GpuModel
from trainmaster.core.money.goodput import interval
from trainmaster.estimate import Cluster, Estimate, calibration, choose, estimate, gpu_bytes, published, shapes
from trainmaster.estimate.published import FindBus
from trainmaster.models import family

_CURVE_POINTS = 120
_LEAST_TOKENS = 1024  # a context below this is another model
_OTHER_TRAINER = (
    "more GPUs with a larger batch_sequences; or a trainer with tensor and pipeline parallelism (torchtitan, "
    "Megatron-Bridge), run as `command:` of a job"
)


def build(
    config: TrainConfig,
    cluster: Cluster,
    *,
    find_bus: FindBus,
    words: Sequence[str],
    tokens: int | None,
    usd_per_gpu_hour: float | None,
    instance: str | None,
    disk_gbps: float | None,
    mttf_h: float | None = None,
    restart_s: float | None = None,
) -> dict[str, Any]:
    """The whole plan of a config on a cluster. `words` are the config's arguments on a command line."""
    result = estimate(config, cluster)
    if result.fits is False:  # what cannot run has no speed
        result = replace(result, speed=None)
    counts = shapes.count(config.model)
    step_tokens = config.batch_sequences * config.sequence_tokens
    steps = -(-tokens // step_tokens) if tokens is not None else config.steps
    checkpoint = _checkpoint(config, cluster, result, disk_gbps=disk_gbps)
    return {
        "model": config.model.name,
        "parameters": counts.all,
        "active_parameters": counts.active,
        "flops_per_token": family.of(config.model).flops_per_token(
            config.model, sequence_tokens=config.sequence_tokens
        ),
        "step_tokens": step_tokens,
        "sequence_tokens": config.sequence_tokens,
        "batch_sequences": config.batch_sequences,
        "gpu": cluster.gpu.name if cluster.gpu is not None else None,
        "gpus": cluster.gpus,
        "nodes": cluster.nodes,
        "instance": instance,
        "setting": _setting(result),
        "memory": _memory(result),
        "fits": result.fits,
        "speed": _speed(result),
        "speed_unknown": "it does not fit" if result.fits is False else result.speed_unknown,
        "run": _run(config, result, steps=steps, step_tokens=step_tokens, usd_per_gpu_hour=usd_per_gpu_hour),
        "checkpoint": checkpoint,
        "failures": _failures(config, cluster, result, checkpoint, mttf_h=mttf_h, restart_s=restart_s),
        "suggestion": _suggestion(config, cluster, words),
        "would_fit": _would_fit(config, cluster, find_bus) if result.fits is False else [],
        "table": _table(config, cluster, find_bus),
        "peak_learning_rate": config.optimizer.lr,
        "learning_rates": _learning_rates(config, steps),
        "notes": _notes(config, cluster, result, checkpoint, find_bus),
    }


def _setting(result: Estimate) -> dict[str, Any]:
    setting = result.setting
    return {
        "shard_ranks": setting.shard_ranks,
        "micro_sequences": setting.micro_sequences,
        "passes": setting.passes,
        "recompute": setting.recompute,
        "compiled": setting.compiled,
        "float8": setting.float8,
        "compute_bytes": setting.compute_bytes,
        "master_bytes": setting.master_bytes,
        "cpu_offload": setting.cpu_offload,
    }


def _memory(result: Estimate) -> dict[str, Any]:
    memory = result.memory
    return {
        "moment": memory.moment,
        "parts_bytes": dict(memory.parts),
        "peak_bytes": memory.peak,
        "reserve_bytes": memory.reserve,
        "needed_bytes": memory.needed,
        "gpu_bytes": result.gpu_bytes,
        "host_pinned_bytes": memory.host_pinned,
    }


def _speed(result: Estimate) -> dict[str, Any] | None:
    if result.speed is None:
        return None
    return {
        "tokens_per_s": result.speed.tokens_per_s,
        "tokens_per_s_per_gpu": result.speed.tokens_per_s / result.setting.ranks,
        "mfu": result.speed.mfu,
        "step_s": result.speed.step_s,
        "parts_s": dict(result.speed.parts),
    }


def _run(
    config: TrainConfig, result: Estimate, *, steps: int, step_tokens: int, usd_per_gpu_hour: float | None
) -> dict[str, Any]:
    """The whole run: its steps, and its evaluations at a third of a step's cost a token (no backward pass)."""
    row: dict[str, Any] = {"steps": steps, "tokens": steps * step_tokens, "usd_per_gpu_hour": usd_per_gpu_hour}
    if result.speed is None:
        return row | {"seconds": None, "days": None, "gpu_hours": None, "usd": None}
    evaluated = -(-steps // config.epoch_steps) * config.eval_sequences * config.sequence_tokens
    seconds = steps * result.speed.step_s + evaluated / (3 * result.speed.tokens_per_s)
    hours = seconds / 3600 * result.setting.ranks
    usd = hours * usd_per_gpu_hour if usd_per_gpu_hour is not None else None
    return row | {"seconds": seconds, "days": seconds / 86400, "gpu_hours": hours, "usd": usd}


def _checkpoint(config: TrainConfig, cluster: Cluster, result: Estimate, *, disk_gbps: float | None) -> dict[str, Any]:
    size, per_node = result.memory.checkpoint, disk_gbps or calibration.load().save_gbps
    link = cluster.gpu.d2h_gbps if cluster.gpu is not None else None
    write_s = size / (1e9 * per_node * cluster.nodes)
    step_s = result.speed.step_s if result.speed is not None else None
    return {
        "bytes": size,
        "kept_bytes": size * (config.checkpoint.keep + 1),  # one more while it is written
        "stage_s": size / cluster.gpus / (1e9 * link) if link is not None else None,
        "write_s": write_s,
        "write_gbps_per_node": per_node,
        "every_steps": config.checkpoint.every_steps,
        "least_every_steps": -(-write_s // step_s) if step_s is not None else None,
    }


def _failures(
    config: TrainConfig,
    cluster: Cluster,
    result: Estimate,
    checkpoint: dict[str, Any],
    *,
    mttf_h: float | None,
    restart_s: float | None,
) -> dict[str, Any]:
    """What failures cost: the best interval between saves, and the ETTR with it and with that of the config."""
    facts = calibration.load()
    mttf_s = mttf_h * 3600 if mttf_h is not None else interval.scale_mttf_s(cluster.gpus)
    costs = interval.Costs(
        hold_s=facts.save_hold_s_per_gb * checkpoint["bytes"] / cluster.gpus / 1e9,
        write_s=checkpoint["write_s"],
        restart_s=restart_s if restart_s is not None else facts.restart_s,
    )
    best_s = interval.best_interval_s(costs, mttf_s=mttf_s)
    row: dict[str, Any] = {
        "mttf_h": mttf_s / 3600,
        "mttf_source": "stated" if mttf_h is not None else interval.MTTF_SOURCE,
        "save_hold_s": costs.hold_s,
        "restart_s": costs.restart_s,
        "restart_source": "stated" if restart_s is not None else facts.sources["restart_s"],
    }
    if result.speed is None:
        return row | {"best_every_s": best_s, "best_every_steps": None, "ettr": None, "ettr_as_configured": None}
    step_s = result.speed.step_s
    best = max(1, math.ceil(best_s / step_s))
    # One that writing cannot keep up with begins late: the next save waits for it.
    own_s = max(config.checkpoint.every_steps * step_s, costs.write_s)
    return row | {
        "best_every_s": best * step_s,
        "best_every_steps": best,
        "ettr": interval.expected_ettr(costs, every_s=best * step_s, mttf_s=mttf_s),
        "ettr_as_configured": interval.expected_ettr(costs, every_s=own_s, mttf_s=mttf_s),
    }


def _suggestion(config: TrainConfig, cluster: Cluster, words: Sequence[str]) -> dict[str, Any] | None:
    choice = choose.fastest(config, cluster) if cluster.gpu is not None else None
    if choice is None:
        return None
    fast, memory = choice.estimate.speed, choice.estimate.memory
    named = [
        word for word in words if not word.startswith(tuple(f"{item.split('=')[0]}=" for item in choice.overrides))
    ]
    return {
        "overrides": list(choice.overrides),
        "command": " ".join(["trainmaster train", *named, *choice.overrides]),
        "tokens_per_s": fast.tokens_per_s if fast is not None else None,
        "mfu": fast.mfu if fast is not None else None,
        "needed_bytes": memory.needed,
        "micro_sequences": choice.estimate.setting.micro_sequences,
        "recompute": choice.estimate.setting.recompute,
    }


def _would_fit(config: TrainConfig, cluster: Cluster, find_bus: FindBus) -> list[str]:
    """Changes that make a config fit, nearest first; the suggestion, where there is one, comes before them."""
    ways = []
    if cluster.gpu is not None:
        more = [item for item in _sizes(config, cluster.gpu, find_bus) if item.gpus > cluster.gpus]
        smallest = choose.fewest(config, more)
        if smallest is not None:
            ways.append(f"{smallest[0].gpus} × {cluster.gpu.name}{_with(smallest[1].overrides)}")
    larger = sorted(gpus.gpus().values(), key=lambda gpu: gpu.memory_gb)
    for gpu in larger:
        if cluster.gpu is None or gpu.memory_gb <= cluster.gpu.memory_gb or gpu.bf16_tflops is None:
            continue
        other = choose.fastest(config, replace(cluster, gpu=gpu, bus_gbps=None))
        if other is not None:
            ways.append(f"{cluster.gpus} × {gpu.name}{_with(other.overrides)}")
            break
    for word, changed in (
        (
            "master=bf16 (half the memory of weights and optimizer; small updates are lost)",
            replace(config, master="bf16"),
        ),
        ("parallel.cpu_offload=true (slow)", replace(config, parallel=replace(config.parallel, cpu_offload=True))),
    ):
        way = choose.fastest(changed, cluster) if changed != config else None
        if way is not None:
            ways.append(f"{word}{_with(way.overrides)}")
    for tokens in (config.sequence_tokens // 2, config.sequence_tokens // 4):
        shorter = choose.fastest(replace(config, sequence_tokens=tokens), cluster) if tokens >= _LEAST_TOKENS else None
        if shorter is not None:
            ways.append(f"sequence_tokens={tokens} (a shorter context){_with(shorter.overrides)}")
            break
    return ways or [_OTHER_TRAINER]


def _table(config: TrainConfig, named: Cluster, find_bus: FindBus) -> list[dict[str, Any]]:
    """Every known GPU in every number: the fastest setting that fits there. A stated power limit is the named GPU's."""
    rows = []
    for gpu in gpus.gpus().values():
        if gpu.bf16_tflops is None and config.precision != "fp32":
            continue  # T4, V100: no bfloat16
        cells = []
        for size in _sizes(config, gpu, find_bus):
            cluster = replace(size, power_w=named.power_w if gpu == named.gpu else None)
            choice = choose.fastest(config, cluster)
            speed = choice.estimate.speed if choice is not None else None
            cells.append(
                {
                    "gpus": cluster.gpus,
                    "fits": choice is not None,
                    "overrides": list(choice.overrides) if choice is not None else None,
                    "needed_bytes": choice.estimate.memory.needed if choice is not None else None,
                    "tokens_per_s": speed.tokens_per_s if speed is not None else None,
                    "bus_known": cluster.gpus == 1 or cluster.bus_gbps is not None,
                }
            )
        rows.append({"gpu": gpu.name, "gpu_bytes": gpu_bytes(gpu), "counts": cells})
    return rows


def _sizes(config: TrainConfig, gpu: GpuModel, find_bus: FindBus) -> list[Cluster]:
    """Clusters of this GPU that the batch divides over."""
    sizes = []
    for count in choose.COUNTS:
        if config.batch_sequences % count == 0:
            bus = find_bus(gpu, nodes=-(-count // 8)) if count > 1 else None
            gbps = bus.gbps if bus is not None else None
            sizes.append(Cluster(gpu=gpu, gpus=count, gpus_per_node=min(8, count), bus_gbps=gbps))
    return sizes


def _learning_rates(config: TrainConfig, steps: int) -> list[list[float]]:
    top = min(config.optimizer.warmup_steps, steps - 1)
    shown = sorted({top, *(round(i * (steps - 1) / _CURVE_POINTS) for i in range(_CURVE_POINTS + 1))})
    return [[step + 1, learning_rate(config.optimizer, step=step, steps=steps)] for step in shown]


def _notes(
    config: TrainConfig, cluster: Cluster, result: Estimate, checkpoint: dict[str, Any], find_bus: FindBus
) -> list[str]:
    """Limits of the figures that a reader must know."""
    notes, facts = [], calibration.load()
    if cluster.gpu is not None and cluster.gpu.name != facts.measured_on:
        notes.append(f"calibrated on {facts.measured_on}; {cluster.gpu.name} by its datasheet alone")
    if cluster.gpus > 1 and cluster.gpu is not None:
        bus = find_bus(cluster.gpu, nodes=cluster.nodes)
        if cluster.bus_gbps is None or bus is None:
            notes.append("no bandwidth between these GPUs is published: speed is an upper bound")
        else:
            notes.append(f"between GPUs: {bus.source}")
            low, high = published.span(find_bus)
            notes.append(
                f"several GPUs were never measured here; planned over published speed of other trainers on 8 to 128 "
                f"GPUs: {low:.2f} to {high:.2f} (docs/how/plan.md)"
            )
    if cluster.gpu is not None and cluster.gpu.power_w is not None:
        limit = cluster.power_w if cluster.power_w is not None else cluster.gpu.power_w
        said = "--power states a lower limit" if cluster.power_w is None else f"--power {cluster.power_w:g}"
        notes.append(f"cards at {min(limit, cluster.gpu.power_w):g} of their {cluster.gpu.power_w:g} W ({said})")
    if config.model.experts is not None:
        notes.append("mixtures of experts were never measured here; experts are taken as evenly used")
    expected = default_lr.expected_lr(config.model.name, config.model.width)
    if config.optimizer.lr > default_lr.FAR_ABOVE * expected:
        notes.append(
            f"optimizer.lr {config.optimizer.lr:g} is {config.optimizer.lr / expected:.0f} times what suits this model "
            f"({expected:g}); it may diverge: leave lr out, or lower it"
        )
    if config.optimizer.schedule == "plateau":
        notes.append("plateau: the learning rate follows the evaluations; shown as if all of them improved")
    least = checkpoint["least_every_steps"]
    if least is not None and config.checkpoint.every_steps < least:
        notes.append(
            f"a save takes {checkpoint['write_s']:.0f} s to write, longer than {config.checkpoint.every_steps} steps; "
            f"use checkpoint.every_steps={least:.0f} or more, or a faster disk (--disk)"
        )
    if result.setting.cpu_offload:
        notes.append("cpu_offload: the host's part of a step was never measured here")
    return notes


def _with(overrides: Sequence[str]) -> str:
    return f" with {' '.join(overrides)}" if overrides else ""
