"""The plan agrees with what was measured on an H200: peak memory within 10 %, tokens/s within 15 %."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from trainmaster import estimate as estimates
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.gpus import find_gpu
from trainmaster.core.schema import build
from trainmaster.estimate import Cluster, calibration, estimate

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


def test_it_covers_what_was_promised() -> None:
    assert {row["preset"] for row in DOCUMENT["measured"]} >= {"llama3.2-1b", "llama3.1-8b"}


def test_every_number_of_the_calibration_says_where_it_comes_from() -> None:
    sources = calibration.load().sources
    stated = {"save_gbps", *DOCUMENT["memory"], *DOCUMENT["speed"]}
    together = {
        "attention_backward_share": "attention_forward_share",
        "inline_ecc_below_gbps": "visible_share_inline_ecc",
    }
    assert {together.get(key, key) for key in stated} == set(sources)
