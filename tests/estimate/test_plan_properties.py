"""A plan moves the way it must: more work needs more, more GPUs need less of each, and what it suggests fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trainmaster.core.config.train import TrainConfig
from trainmaster.core.gpus import find_gpu, gpus
from trainmaster.core.schema import build
from trainmaster.estimate import Cluster, calibration, choose, estimate, gpu_bytes, memory, speed
from trainmaster.estimate.layout import setting_of

H200 = find_gpu("H200")
assert H200 is not None


@st.composite
def configs(draw: st.DrawFn) -> TrainConfig:
    heads = draw(st.sampled_from([4, 8, 16, 32]))
    shape = {
        "layers": draw(st.integers(1, 40)),
        "width": heads * 64,
        "heads": heads,
        "kv_heads": draw(st.sampled_from([1, 2, 4])),
        "ffn_width": draw(st.sampled_from([512, 2048, 8192])),
        "vocab": draw(st.sampled_from([256, 32_000, 128_256])),
        "tied": draw(st.booleans()),
        "qk_norm": draw(st.booleans()),
        "experts": draw(st.none() | st.just(8)),
    }
    batch = draw(st.sampled_from([8, 16, 64]))
    return build(
        TrainConfig,
        {
            "model": shape,
            "batch_sequences": batch,
            "micro_sequences": draw(st.none() | st.just(1)),
            "sequence_tokens": draw(st.sampled_from([512, 2048, 8192])),
            "master": draw(st.sampled_from(["fp32", "bf16"])),
            "parallel": {
                "recompute": draw(st.sampled_from(["none", "ops", "layers", "full"])),
                "compile": draw(st.sampled_from(["auto", "off"])),
            },
        },
    )


def peak(config: TrainConfig, ranks: int = 1) -> int:
    setting = setting_of(config, ranks=ranks, ranks_per_node=8)
    return memory.measure(config.model, setting, calibration.load().memory).peak


def pace(config: TrainConfig, gpu: Any = H200, ranks: int = 1, bus: float | None = None) -> speed.Speed:
    setting = setting_of(config, ranks=ranks, ranks_per_node=8)
    return speed.measure(config.model, setting, gpu, calibration.load().speed, bus_gbps=bus)


@pytest.mark.slow
@given(configs())
def test_more_of_anything_needs_more_memory(config: TrainConfig) -> None:
    model = config.model
    here = peak(config)
    assert peak(replace(config, model=replace(model, layers=model.layers + 1))) > here
    assert peak(replace(config, model=replace(model, ffn_width=2 * model.ffn_width))) > here
    assert peak(replace(config, sequence_tokens=2 * config.sequence_tokens)) >= here
    assert peak(replace(config, batch_sequences=2 * config.batch_sequences)) >= here
    assert peak(replace(config, master="fp32")) >= peak(replace(config, master="bf16"))


@pytest.mark.slow
@given(configs())
def test_computing_again_keeps_less_and_takes_longer(config: TrainConfig) -> None:
    def kept(again: Any) -> int:
        changed = replace(config, parallel=replace(config.parallel, recompute=again))
        return memory.kept_bytes(config.model, setting_of(changed, ranks=1, ranks_per_node=8))

    def took(again: Any) -> float:
        return round(pace(replace(config, parallel=replace(config.parallel, recompute=again))).step_s, 9)

    assert kept("full") < kept("ops") < kept("none")
    assert kept("full") <= kept("layers") <= kept("none")
    # Not longer where the host is what it waits for.
    assert took("none") <= took("ops") <= took("full")
    assert took("none") <= took("layers") <= took("full")


@pytest.mark.slow
@given(configs(), st.sampled_from([2, 4, 8]))
def test_more_gpus_hold_less_each_and_are_faster_together(config: TrainConfig, ranks: int) -> None:
    facts = calibration.load().memory
    alone, shared = (
        memory.measure(config.model, setting_of(config, ranks=n, ranks_per_node=8), facts) for n in (1, ranks)
    )
    for part in ("weights", "optimizer"):
        assert shared.parts[part] <= alone.parts[part] / ranks + 64
    assert shared.checkpoint == alone.checkpoint
    # With FSDP on one rank too: a lone one in bf16 has none, and a tiny model gains nothing from company.
    masters = replace(config, master="fp32")
    assert pace(masters, ranks=ranks).tokens_per_s >= 0.99 * pace(masters).tokens_per_s
    # A slower wire never helps.
    assert pace(config, ranks=ranks, bus=50).tokens_per_s <= pace(config, ranks=ranks, bus=400).tokens_per_s


@given(configs())
def test_time_is_the_sum_of_its_parts_and_no_peak_is_passed(config: TrainConfig) -> None:
    found = pace(config)
    assert found.step_s == pytest.approx(sum(found.parts.values()))
    assert all(seconds >= 0 for seconds in found.parts.values())
    assert 0 < found.mfu < 1


@pytest.mark.slow
@settings(max_examples=40)
@given(configs(), st.sampled_from(["H200", "H100-SXM", "A100-SXM4-40GB", "L4"]), st.sampled_from([1, 2, 8]))
def test_what_is_suggested_fits_and_is_the_fastest_known(config: TrainConfig, name: str, count: int) -> None:
    gpu = find_gpu(name)
    assume(config.batch_sequences % count == 0)
    cluster = Cluster(gpu=gpu, gpus=count, gpus_per_node=count)
    config = replace(config, micro_sequences=None)
    found, here = choose.fastest(config, cluster), estimate(config, cluster)
    if found is None:
        assert not here.fits
        return
    assert found.estimate.fits
    assert found.estimate.speed is not None
    if here.fits and here.speed is not None:
        assert found.estimate.speed.tokens_per_s >= 0.995 * here.speed.tokens_per_s
    # The words that are printed lead to the very setting.
    assert found.estimate == estimate(found.config, cluster)
    assert bool(found.overrides) == (found.estimate.setting != here.setting)


def test_a_gpu_hands_out_less_than_its_vendor_says_and_an_h200_what_was_seen() -> None:
    for gpu in gpus().values():
        assert 0.9 * gpu.memory_gb < gpu_bytes(gpu) / 2**30 < gpu.memory_gb
    assert gpu_bytes(H200) == pytest.approx(150_109_880_320, rel=0.01)  # tests/hosts/h200, probe cuda_init


def test_several_passes_hold_their_gradients() -> None:
    def parts(ranks: int = 1, **changes: Any) -> dict[str, int]:
        config = build(
            TrainConfig,
            {"model": {"preset": "llama3.2-1b"}, "batch_sequences": 8, "sequence_tokens": 4096, **changes},
        )
        setting = setting_of(config, ranks=ranks, ranks_per_node=8, gpu_bytes=gpu_bytes(H200))
        return dict(memory.measure(config.model, setting, calibration.load().memory).parts)

    assert parts()["gradients"] == 0  # at the loss of the only pass
    weights = parts()["weights"]
    assert parts(micro_sequences=4)["gradients"] == weights  # fp32 masters: whole or cut up is one on one GPU
    lone = parts(micro_sequences=4, master="bf16")
    assert lone["gradients"] == lone["weights"]  # without FSDP, in the weights' own type
    # Whole and in float32 until they are summed over the ranks; or cut up in the weights' type after each pass.
    whole = parts(ranks=2, micro_sequences=2, master="bf16", parallel={"reduce": "last"})
    assert whole["gradients"] == 4 * whole["weights"]
    each = parts(ranks=2, micro_sequences=2, master="bf16", parallel={"reduce": "each"})
    assert each["gradients"] == each["weights"]


@pytest.mark.parametrize(
    ("changes", "gpu", "why"),
    [
        ({"precision": "fp32"}, "H200", "float32"),
        ({}, "T4", "bf16"),
        ({"parallel": {"float8": True}}, "A100-SXM4-80GB", "float8"),
    ],
)
def test_what_is_not_known_has_no_speed(changes: dict[str, Any], gpu: str, why: str) -> None:
    cluster = Cluster(gpu=find_gpu(gpu), gpus=1, gpus_per_node=1)
    found = estimate(build(TrainConfig, changes), cluster)
    assert found.speed is None
    assert why in str(found.speed_unknown)
    assert found.memory.peak > 0
