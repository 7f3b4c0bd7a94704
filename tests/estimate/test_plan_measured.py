"""The plan agrees with what was measured on an H200: peak memory within 10 %, tokens/s within 15 %."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainmaster import estimate as estimates
from trainmaster.bench import bus_baselines
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.gpus import find_gpu
from trainmaster.core.schema import build
from trainmaster.estimate import Cluster, calibration, estimate, plan_report, published

DOCUMENT = tomllib.loads((Path(estimates.__file__).parent / "data" / "estimate.toml").read_text())


def name(row: dict[str, Any]) -> str:
    return " ".join(str(value) for key, value in row.items() if key not in ("peak_gib", "tokens_per_s"))


@pytest.mark.parametrize("row", DOCUMENT["measured"], ids=name)
def test_the_plan_is_what_was_measured(row: dict[str, Any]) -> None:
    config = build(
        TrainConfig,
        {
            "model": {"preset": row["preset"]},
            "batch_sequences": row["rows"],
            "sequence_tokens": row["sequence_tokens"],
            "eval_sequences": 0,
            "master": row["master"],
            "parallel": {"recompute": row.get("recompute", "none"), "float8": row.get("float8", False)},
        },
    )
    found = estimate(config, Cluster(gpu=find_gpu(DOCUMENT["measured_on"]), gpus=1, gpus_per_node=1))
    assert found.speed is not None
    assert found.memory.peak / 2**30 == pytest.approx(row["peak_gib"], rel=0.10)
    assert found.speed.tokens_per_s == pytest.approx(row["tokens_per_s"], rel=0.15)


@pytest.mark.parametrize("row", DOCUMENT["published"], ids=lambda row: row["source"])
def test_the_plan_of_several_gpus_is_within_a_tenth_of_published_runs(row: dict[str, Any]) -> None:
    assert published.ratio(row, bus_baselines.find) == pytest.approx(1.0, abs=0.10)


def test_more_nodes_do_not_make_a_gpu_faster() -> None:
    config = build(TrainConfig, {"model": {"preset": "llama3.1-8b"}, "batch_sequences": 1024, "sequence_tokens": 8192})
    gpu, rates = find_gpu("H100-SXM"), []
    for gpus in (16, 64, 256, 1024):
        cluster = Cluster(gpu=gpu, gpus=gpus, gpus_per_node=8, bus_gbps=300.0)
        speed = estimate(replace(config, batch_sequences=gpus), cluster).speed
        assert speed is not None
        rates.append(speed.tokens_per_s / gpus)
    assert rates == sorted(rates, reverse=True)


def test_a_power_limit_costs_speed_and_none_above_the_datasheet() -> None:
    config = build(TrainConfig, {"model": {"preset": "llama3.1-8b"}, "batch_sequences": 1, "sequence_tokens": 8192})
    speeds = []
    for power in (350, 500, 700, 900, None):
        cluster = Cluster(gpu=find_gpu("H200"), gpus=1, gpus_per_node=1, power_w=power)
        speeds.append(estimate(config, cluster).speed.tokens_per_s)  # type: ignore[union-attr]
    assert speeds[0] < speeds[1] < speeds[2] == speeds[3] == speeds[4]


@pytest.mark.slow
def test_what_does_not_fit_has_no_speed_and_a_way_out() -> None:
    layers = {"layers": 126, "width": 16384, "heads": 128, "kv_heads": 8, "ffn_width": 53248, "vocab": 128256}
    config = build(TrainConfig, {"model": layers, "batch_sequences": 8, "sequence_tokens": 8192})
    plan = plan_report.build(
        config,
        Cluster(gpu=find_gpu("H100-SXM"), gpus=8, gpus_per_node=8),
        find_bus=bus_baselines.find, words=[], tokens=None, usd_per_gpu_hour=None, instance=None, disk_gbps=None,
    )  # fmt: skip
    assert (plan["fits"], plan["speed"], plan["speed_unknown"]) == (False, None, "it does not fit")
    assert plan["run"]["seconds"] is None
    assert any("tensor and pipeline parallelism" in way for way in plan["would_fit"])


def test_it_covers_what_was_promised() -> None:
    assert {row["preset"] for row in DOCUMENT["measured"]} >= {"llama3.2-1b", "llama3.1-8b"}


def test_every_number_of_the_calibration_says_where_it_comes_from() -> None:
    sources = calibration.load().sources
    stated = {"save_gbps", "save_hold_s_per_gb", "restart_s", *DOCUMENT["memory"], *DOCUMENT["speed"]}
    together = {
        "attention_backward_share": "attention_forward_share",
        "inline_ecc_below_gbps": "visible_share_inline_ecc",
    }
    assert {together.get(key, key) for key in stated} == set(sources)
