"""Acceptance runs with real ranks on CPUs, healthy and with a fault in one of them."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path
from typing import Any

import acceptance
import jsonschema
import pytest
import torch

from fork_server import ForkServer
from trainmaster.bench.accept import rank, workload
from trainmaster.bench.accept import step as steps
from trainmaster.bench.accept.digest import digest, flip_bit
from trainmaster.bench.accept.judge import judge
from trainmaster.bench.accept.options import Fault, Options
from trainmaster.bench.accept.step import Step
from trainmaster.bench.collectives.capabilities import free_ports
from trainmaster.models.resnet import resnet18, resnet50
from trainmaster.train.parallel.rank_info import RankInfo

RESNET = "--model resnet18 --image-size 32 --num-classes 10 --batch-size 4 --warmup-iterations 1"
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


@pytest.mark.matrix(one_in=10, of="acceptance, collectives and jobs of real ranks")
@pytest.mark.spawns
def test_a_rank_that_hangs_is_named_and_not_those_that_waited(tmp_path: Path) -> None:
    """SIGSTOP: its process lives, and the others give up waiting."""
    out = tmp_path / "results.json"
    words = f"{acceptance.TINY} --duration 60 --processes 3 --backend gloo --timeout 3 --out {out}"
    command = [sys.executable, "-m", "trainmaster.bench.accept", *words.split()]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=acceptance.clean(), text=True
    ) as ran:
        assert ran.stderr is not None
        next(line for line in ran.stderr if rank.BEGIN in line)
        children = Path(f"/proc/{ran.pid}/task/{ran.pid}/children").read_text().split()
        (stopped,) = (one for one in children if "RANK=1" in Path(f"/proc/{one}/environ").read_text().split("\0"))
        os.kill(int(stopped), signal.SIGSTOP)
        ran.stderr.read()
        assert ran.wait(120) == 1
    (check,) = json.loads(out.read_text())["checks"]
    (finding,) = check["findings"]
    assert (finding["device"], finding["verdict"]) == ("rank1", "fail")
    assert finding["reason"].startswith("rank 1 hangs: rank ")


@pytest.mark.matrix(one_in=10, of="acceptance, collectives and jobs of real ranks")
@pytest.mark.spawns
def test_data_that_cannot_be_had_accuses_no_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINMASTER_DATASETS_URL", "http://127.0.0.1:1/a mirror")
    code, document, _ = accept(tmp_path, f"{RESNET} --data-mode cifar10 --data-dir {tmp_path}")
    assert (code, document["overall"]) == (3, "INCOMPLETE")
    (finding,) = document["checks"][0]["findings"]
    assert finding["verdict"] == "error"
    assert "copy cifar-10-python.tar.gz to" in finding["reason"]


def validate(document: dict[str, Any]) -> None:
    """Against the JSON Schema that the package ships."""
    text = resources.files("trainmaster.bench").joinpath("data", "accept-results.schema.json").read_text()
    jsonschema.validate(document, json.loads(text))


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


@pytest.mark.matrix(one_in=10, of="acceptance, collectives and jobs of real ranks")
@pytest.mark.spawns
@pytest.mark.slow
def test_two_ranks_train_and_the_fields_of_users_are_there(tmp_path: Path) -> None:
    words = f"{RESNET} --processes 2 --active-iterations 4 --min-throughput 0.01"
    code, document, _ = accept(tmp_path, words)
    assert set(document) >= SEED
    validate(document)
    assert accused(document) <= {("accept_stragglers", "rank0"), ("accept_stragglers", "rank1")}  # two busy cores
    assert code == document["exit_code"]
    assert document["total_samples"] == 2 * 4 * 4
    assert document["device"] == "cpu"
    assert len({one["parameters_digest"] for one in document["ranks"]}) == 1


@pytest.mark.matrix(one_in=4)
@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("slow:1:12", {("accept_stragglers", "rank1")}),
        ("flip:2", {("accept_parameters", "rank2"), ("accept_gradients", "rank2")}),
    ],
)
def test_a_fault_of_one_of_three_ranks_is_named(
    programs: ForkServer, tmp_path: Path, fault: str, named: set[tuple[str, str]]
) -> None:
    words = f"{acceptance.TINY} --active-iterations 6 --inject {fault}"
    environments = acceptance.torchrun(3, free_ports(1)[0])
    codes, document, _ = acceptance.accept(programs, tmp_path, words, environments)
    assert codes == [1, 0, 0]
    assert document["overall"] == "FAIL"
    assert named <= accused(document)
    assert {pair for pair in accused(document) if pair[0] != "accept_stragglers"} <= named


class SimulatedTime:
    """Stands in place of the module `time` of a rank: a step takes 10 ms, and a sleep as long as it says."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.proof
@pytest.mark.parametrize(("share", "named"), [(0.3, {("accept_stragglers", "rank2")}), (0.04, set())])
def test_a_rank_that_is_slower_by_30_percent_is_named_and_no_other(
    monkeypatch: pytest.MonkeyPatch, share: float, named: set[tuple[str, str]]
) -> None:
    """In simulated time: on busy cores other ranks are slower by as much. The processes: `slow:1:12` above."""
    simulated, run_step = SimulatedTime(), Step.run

    def take_10_ms(step: Step) -> None:
        run_step(step)
        simulated.sleep(0.01)

    monkeypatch.setattr(Step, "run", take_10_ms)
    monkeypatch.setattr(rank, "time", simulated)
    monkeypatch.setattr(steps, "time", simulated)
    records = []
    for number in range(4):
        fault = Fault(kind="slow", rank=0, share=share) if number == 2 else None
        options = dataclasses.replace(SMALL, min_throughput=0.01, fault=fault)
        (record,) = rank.run(options, ALONE, show=lambda _: None)
        records.append(dataclasses.replace(record, rank=number))
    checks = judge(options, records, flops=1)
    assert {(one.check, each.device) for one in checks for each in one.findings if each.verdict == "fail"} == named


@pytest.mark.matrix(one_in=10, of="acceptance, collectives and jobs of real ranks")
@pytest.mark.spawns
@pytest.mark.slow
def test_a_rank_that_ends_is_named(tmp_path: Path) -> None:
    words = f"{acceptance.TINY} --processes 2 --active-iterations 6 --inject exit:1 --log-dir {tmp_path / 'logs'}"
    code, document, _ = accept(tmp_path, words)
    assert (code, document["overall"]) == (1, "FAIL")
    assert accused(document) == {("accept_ranks", "rank1")}
    validate(document)


def test_a_loss_that_is_no_number_fails() -> None:
    fault = Fault(kind="nan", rank=0)
    options = dataclasses.replace(SMALL, warmup_iterations=0, active_iterations=2, min_throughput=0.01, fault=fault)
    records = rank.run(options, ALONE, show=lambda _: None)
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


ALONE = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, nodes=1, master=None)
SMALL = Options(
    model="transformer", layers=1, width=16, heads=2, sequence=8, num_classes=11, batch_size=4, warmup_iterations=1,
    active_iterations=3, learning_rate=0.1,
)  # fmt: skip


def test_repeats_of_a_duration_are_measured() -> None:
    (found,) = rank.run(dataclasses.replace(SMALL, repeats=2, duration_s=0.05), ALONE, show=lambda _: None)
    assert len(found.repeats_s) == 2
    assert len(found.steps_s) == len(found.losses)
    assert len(found.steps_s) % 2 == 0


def test_accumulated_batches_give_the_gradients_of_one_large_batch() -> None:
    """Two batches of two samples are the same four samples, and the mean of the means is their mean."""
    found = []
    for options in (SMALL, dataclasses.replace(SMALL, batch_size=2, accumulate=2)):
        model = workload.build_model(options, torch.device("cpu"))
        batch = workload.synthetic_batch(options, torch.device("cpu"), rank=0)
        step = Step(model, batch, options, world=1, precision="fp32")
        step.run()
        found.append((float(step.loss), [one.detach().clone() for one in model.parameters()]))
    (loss, parameters), (again, others) = found
    assert loss == pytest.approx(again, rel=1e-5)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(parameters, others, strict=True))


def test_one_flipped_bit_changes_the_digest() -> None:
    tensors = [torch.randn(5, 3), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)]
    before = digest(tensors)
    assert digest([one.clone() for one in tensors]) == before
    flip_bit(tensors[1])
    assert digest(tensors) != before
    assert digest(tensors[::-1]) != digest(tensors)
