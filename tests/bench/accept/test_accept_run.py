"""Acceptance runs with real ranks on CPUs, healthy and with a fault in one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from trainmaster.bench.accept import rank, workload
from trainmaster.bench.accept.digest import digest, flip_bit
from trainmaster.bench.accept.judge import judge
from trainmaster.bench.accept.options import Fault, Options
from trainmaster.models.resnet import resnet18, resnet50
from trainmaster.train.parallel.rank_info import RankInfo

RESNET = "--model resnet18 --image-size 64 --num-classes 10 --batch-size 4 --warmup-iterations 1"
TINY = "--model transformer --layers 1 --width 16 --heads 2 --sequence 8 --num-classes 11 --warmup-iterations 1"
SEED = {
    "model", "world_size", "batch_size_per_gpu", "global_batch_size", "total_time_seconds", "average_step_time_seconds",
    "throughput_samples_per_second", "total_samples", "device", "backend",
}  # fmt: skip


def accept(folder: Path, words: str) -> tuple[int, dict[str, Any], list[tuple[float, str]]]:
    """Exit code, results.json, and the lines of progress with the time of their arrival."""
    out = folder / "results.json"
    command = [sys.executable, "-m", "trainmaster.bench.accept", "--out", str(out), *words.split()]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    lines = []
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment, text=True
    ) as ran:
        assert ran.stderr is not None
        for line in ran.stderr:
            lines.append((time.monotonic(), line.strip()))
        code = ran.wait(120)
    assert out.exists(), lines[-5:]
    return code, json.loads(out.read_text()), lines


def accused(document: dict[str, Any]) -> set[tuple[str, str]]:
    return {
        (check["check"], finding["device"])
        for check in document["checks"] for finding in check["findings"] if finding["verdict"] == "fail"
    }  # fmt: skip


def test_parameters_are_as_many_as_torchvision_has() -> None:
    with torch.device("meta"):
        assert sum(one.numel() for one in resnet18().parameters()) == 11_689_512
        assert sum(one.numel() for one in resnet50().parameters()) == 25_557_032


def test_operations_of_a_step_are_counted() -> None:
    """ResNet-50 needs 4.09 billion multiply-adds for an image of 224 pixels (torchvision's model page)."""
    assert workload.flops_per_sample(Options()) == pytest.approx(3 * 2 * 4.09e9, rel=0.01)


@pytest.mark.spawns
@pytest.mark.slow
def test_two_ranks_train_and_the_fields_of_users_are_there(tmp_path: Path) -> None:
    words = f"{RESNET} --processes 2 --active-iterations 20 --min-throughput 0.01"
    code, document, lines = accept(tmp_path, words)
    assert set(document) >= SEED
    assert accused(document) <= {("accept_stragglers", "rank0"), ("accept_stragglers", "rank1")}  # two busy cores
    assert code == document["exit_code"]
    assert document["total_samples"] == 2 * 4 * 20
    assert document["device"] == "cpu"
    assert len({one["parameters_digest"] for one in document["ranks"]}) == 1
    # Seen from outside: between the lines of the second and of the last step are eighteen.
    times = {text: at for at, text in lines if text.startswith("active ")}
    outside = (times["active 20/20"] - times["active 2/20"]) / 18
    assert document["average_step_time_seconds"] == pytest.approx(outside, rel=0.5)


@pytest.mark.spawns
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("slow:1:3", {("accept_stragglers", "rank1")}),
        ("flip:2", {("accept_parameters", "rank2"), ("accept_gradients", "rank2")}),
        ("exit:1", {("accept_ranks", "rank1")}),
    ],
)
def test_a_fault_of_one_of_three_ranks_is_named(tmp_path: Path, fault: str, named: set[tuple[str, str]]) -> None:
    words = f"{TINY} --processes 3 --active-iterations 6 --min-throughput 0.01 --inject {fault}"
    code, document, _ = accept(tmp_path, words)
    assert code == 1
    assert document["overall"] == "FAIL"
    assert named <= accused(document)
    assert {pair for pair in accused(document) if pair[0] != "accept_stragglers"} <= named


def test_a_loss_that_is_no_number_fails() -> None:
    options = Options(
        model="resnet18", image_size=64, num_classes=10, batch_size=4, warmup_iterations=0, active_iterations=2,
        min_throughput=0.01, fault=Fault(kind="nan", rank=0),
    )  # fmt: skip
    info = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, nodes=1, master=None)
    records = rank.run(options, info, show=lambda _: None)
    found = {one.check: one.verdict.value for one in judge(options, records, flops=1)}
    assert found["accept_loss"] == "fail"


def test_a_transformer_trains() -> None:
    options = Options(
        model="transformer", layers=1, width=16, heads=2, sequence=8, num_classes=11, batch_size=4,
        warmup_iterations=1, active_iterations=20, learning_rate=0.1,
    )  # fmt: skip
    info = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, nodes=1, master=None)
    (record,) = rank.run(options, info, show=lambda _: None)
    assert record.losses[-1] < record.losses[0]
    assert record.gradients_digest == record.gradients_again


def test_one_flipped_bit_changes_the_digest() -> None:
    tensors = [torch.randn(5, 3), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)]
    before = digest(tensors)
    assert digest([one.clone() for one in tensors]) == before
    flip_bit(tensors[1])
    assert digest(tensors) != before
    assert digest(tensors[::-1]) != digest(tensors)
