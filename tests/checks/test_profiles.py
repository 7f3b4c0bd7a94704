"""Profiles: every fact has a source, names find the right model, and what is stated beats what is detected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from machines import H200, Machine
from trainmaster.checks import profiles
from trainmaster.cli.main import build
from trainmaster.core.errors import SpecError
from trainmaster.core.expect import Expect
from trainmaster.core.gpus import UNVERIFIED

SEED_INSTANCES = """
    ml.g5.xlarge ml.g5.12xlarge ml.p4d.24xlarge ml.p4de.24xlarge ml.p5.48xlarge ml.p5e.48xlarge ml.p5en.48xlarge
    ml.g6.12xlarge ml.g6e.48xlarge ml.p6-b200.48xlarge
""".split()


def test_every_fact_has_a_source() -> None:
    for model in profiles.gpus().values():
        assert model.names
        sources = [source for source in model.sources.values() if source != UNVERIFIED]
        assert all(source.startswith("http") or " " in source for source in sources)
        assert {"generation", "cuda_min"} & set(model.sources)
        assert {"memory_gb", "memory_kind"} <= set(model.sources)
    for instance in profiles.instances().values():
        assert instance.gpu in profiles.gpus()
        assert "DescribeInstanceTypes" in instance.source
        assert instance.usd_per_hour is None or "price" in instance.source


def test_no_two_models_share_a_name() -> None:
    names = [name.lower() for model in profiles.gpus().values() for name in model.names]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", SEED_INSTANCES)
def test_an_instance_is_found_with_and_without_ml(name: str) -> None:
    assert profiles.find_instance(name) is not None
    assert profiles.find_instance(name) is profiles.find_instance(name.removeprefix("ml."))


@pytest.mark.parametrize(
    ("product", "model"),
    [("NVIDIA H200", "H200"), ("NVIDIA GH200 480GB", "GH200-96GB"), ("NVIDIA H200 NVL", "H200-NVL"),
     ("NVIDIA A10G", "A10G"), ("NVIDIA A10", "A10"), ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
     ("A100-SXM4-40GB", "A100-SXM4-40GB"), ("Tesla T4", "T4"), ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
     ("NVIDIA H100 80GB HBM3", "H100-SXM"), ("NVIDIA B200", "B200"), ("NVIDIA GB200", "GB200"),
     ("NVIDIA GeForce RTX 3090", None), ("NVIDIA H2000", None), ("", None), (None, None)],
)  # fmt: skip
def test_a_product_name_is_one_model_or_none(product: str | None, model: str | None) -> None:
    found = profiles.of_gpu(product)
    assert (found.name if found else None) == model


@pytest.mark.parametrize(
    ("product", "wanted", "is_it"),
    [("NVIDIA H200", "H200", True), ("NVIDIA H200", "h200", True), ("NVIDIA GH200 480GB", "H200", False),
     ("NVIDIA A100-SXM4-80GB", "A10", False), ("NVIDIA A100-SXM4-80GB", "A100", True),
     ("NVIDIA H100 80GB HBM3", "H100-SXM", True), ("NVIDIA H100 PCIe", "H100-SXM", False),
     ("NVIDIA H100 PCIe", "H100", True), ("NVIDIA L40S", "L40", False), ("NVIDIA L40S", "L4", False)],
)  # fmt: skip
def test_a_wanted_model_is_matched_by_whole_words(product: str, wanted: str, is_it: bool) -> None:
    assert profiles.is_model(product, wanted) is is_it


def test_a_stated_instance_states_everything() -> None:
    known = profiles.resolve(["ml.p5.48xlarge"])
    assert known.profile == "ml.p5.48xlarge"
    assert known.expect == Expect(
        gpus=8, gpu_model="H100-SXM", gpu_memory_gib=72.0, efa_devices=32, cpus=192, ram_gib=1904.6
    )


def test_later_words_win() -> None:
    assert profiles.resolve(["gpus=4", "ml.p5.48xlarge"]).expect.gpus == 8
    assert profiles.resolve(["ml.p5.48xlarge", "gpus=4"]).expect.gpus == 4
    assert profiles.resolve(["gpus=4", {"profile": "ml.p5.48xlarge", "gpus": 2}]).expect.gpus == 2
    assert profiles.resolve([{"driver": "580"}, "H200"]).expect == Expect(
        driver="580", gpu_model="H200", gpu_memory_gib=126.9
    )


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(SpecError) as refused:
        profiles.resolve(["ml.p5.48xlrge", "gpus=x", "nonsense", "gpu=8"])
    text = str(refused.value)
    assert "did you mean ml.p5.48xlarge?" in text
    assert "nonsense" in text
    assert "expected" in text
    assert "--expect gpu: unknown field" in text


def test_an_ec2_machine_is_detected_by_its_firmware(machine: Machine) -> None:
    machine.file("/sys/class/dmi/id/product_name", "p5en.48xlarge\n")
    known = profiles.resolve([], machine.host)
    assert (known.profile, known.expect) == ("p5en.48xlarge", Expect(gpus=8, gpu_model="H200"))
    assert profiles.resolve(["gpus=1"], machine.host).expect.gpus == 1
    machine.answer("env", "NVIDIA_VISIBLE_DEVICES", "GPU-aaaa")  # a container that was given one of them
    assert profiles.resolve([], machine.host).expect == Expect(gpu_model="H200")


def test_a_sagemaker_job_is_detected_by_its_variable(machine: Machine) -> None:
    machine.answer("env", "SM_CURRENT_INSTANCE_TYPE", "ml.g5.12xlarge")
    assert profiles.resolve([], machine.host).expect == Expect(gpus=4, gpu_model="A10G")


@pytest.mark.parametrize("said", ["", "Standard PC (Q35 + ICH9, 2009)\n", "p99.48xlarge", "\x00"])
def test_a_machine_that_is_not_known_expects_nothing(machine: Machine, said: str) -> None:
    machine.file("/sys/class/dmi/id/product_name", said)
    assert profiles.resolve([], machine.host) == profiles.Resolved(expect=Expect(), profile=None)


def test_the_command_takes_profiles_and_a_yaml_file(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("profile: H200\ngpus: 1\ndriver: '580'\n")
    replay = ["check", "--json", "--replay", str(H200), "--only", "gpu_model,gpu_driver,gpu_memory"]
    ran = CliRunner().invoke(build(), [*replay, "--expect", str(site)])
    assert (ran.exit_code, json.loads(ran.stdout)["profile"]) == (0, "H200")
    ran = CliRunner().invoke(build(), [*replay, "--expect", "ml.p5.48xlarge"])
    assert (ran.exit_code, json.loads(ran.stdout)["profile"]) == (1, "ml.p5.48xlarge")
    assert "NVIDIA H200, not H100-SXM" in ran.stdout


def test_a_run_without_a_profile_names_the_model_it_found() -> None:
    ran = CliRunner().invoke(build(), ["check", "--json", "--replay", str(H200), "--only", "gpu_model"])
    assert json.loads(ran.stdout)["profile"] == "H200"


def test_a_wrong_yaml_file_is_told_by_line(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("gpus: 8\nprofile: ml.p5.48xlrge\n")
    ran = CliRunner().invoke(build(), ["check", "--expect", str(site)])
    assert isinstance(ran.exception, SpecError)
    assert "site.yaml:2: profile" in str(ran.exception)
