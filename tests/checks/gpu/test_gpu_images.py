"""The images `acceptance` and `sagemaker` of the Dockerfile, built by podman over Debian with torch, and run.

Rights are the least that a cluster gives: no capability, no root, default seccomp, a root that cannot be written. GPUs
answer as recorded H100; everything else is the image's own.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import gpu_stand_in
import pytest
from gpu_stand_in import INSIDE, NODE
from test_gpu_containers import SICK

import containers
from containers import Registry
from machines import Machine

pytestmark = [
    pytest.mark.spawns,
    pytest.mark.timeout(1800),
    pytest.mark.make("images"),  # minutes of CPU and 5 GB
]
ROOT = Path(__file__).parents[3]
# Neither NVIDIA's repository of DCGM nor a CUDA compiler is in Debian.
IMAGES = {"acceptance": ("NCCL_TESTS_VERSION=none",), "sagemaker": ("NCCL_TESTS_VERSION=none", "DCGM=none")}
BASE = "localhost/debian-torch:1"
RIGHTS = ("--cap-drop", "ALL", "--user", "1000:1000", "--read-only", "--tmpfs", "/job:mode=1777", "--shm-size", "1g")
SPEC = {
    "name": "h100", "target": "local", "preflight": {"expect": {"gpus": 8}},
    "train": {"model": {"layers": 1, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 64}, "steps": 3,
              "batch_sequences": 8, "eval_sequences": 0, "sequence_tokens": 32, "device": "cpu"},
}  # fmt: skip
SUBMIT = f"trainmaster submit {INSIDE}/job.yaml --follow --home /job/home"
CHECKS = ["--level", "1", "--alone", "--expect", "gpus=8", "--work", "/job/work", "--to", "/job/store"]
Damage = Callable[[Machine], None]


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    folder = tmp_path_factory.mktemp("images")
    made = containers.local_podman(folder)
    kept = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "trainmaster" / "images"
    try:
        made.podman("import", str(kept / "base.tar"), BASE)
        for name, arguments in IMAGES.items():
            made.podman(
                "build", "--layers=false", "--network", "host", "--volume", f"{kept / 'wheels'}:/wheels:ro",
                "--build-arg", f"BASE_IMAGE={BASE}", *(word for one in arguments for word in ("--build-arg", one)),
                "--target", name, "--tag", f"localhost/{name}:1", str(ROOT),
            )  # fmt: skip
        yield made
    finally:
        containers.end_podman(folder)


@pytest.fixture
def run(podman: Registry, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command in a container of an image, on a node with recorded GPUs."""

    def start(image: str, command: str, damage: Damage | None = None) -> subprocess.CompletedProcess[str]:
        recorded = gpu_stand_in.recorded(tmp_path, damage)
        place = gpu_stand_in.write(recorded, tmp_path / "recorded", python="/usr/bin/python3")
        (place / "job.yaml").write_text(json.dumps(SPEC))
        words = [
            str(podman.bin / "podman"), "run", "--rm", "--network", "none", *RIGHTS, "--workdir", "/job",
            *gpu_stand_in.device_files(tmp_path, NODE.gpus), "--env", "HOME=/job",
            "--volume", f"{place}:{INSIDE}:ro", "--volume", f"{place}/pci:/sys/bus/pci/devices:ro",
            "--env", f"PATH={INSIDE}/bin:/usr/local/bin:/usr/bin:/usr/sbin:/bin", "--entrypoint", "",
            f"localhost/{image}:1", "sh", "-c", command,
        ]  # fmt: skip
        return subprocess.run(words, capture_output=True, text=True, check=False)

    return start


@pytest.mark.parametrize("image", IMAGES)
def test_a_healthy_node_trains(run: Callable[..., subprocess.CompletedProcess[str]], image: str) -> None:
    ran = run(image, SUBMIT)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-2000:]
    assert "pre-flight WARN" in ran.stdout  # of the kernel log, which is closed to the container
    assert "step 3/3" in ran.stdout


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("fault", SICK)
def test_a_sick_node_is_refused_by_the_name_of_its_fault(
    run: Callable[..., subprocess.CompletedProcess[str]], fault: str, image: str
) -> None:
    name, damage = SICK[fault]
    ran = run(image, SUBMIT, damage)
    assert ran.returncode == 1, ran.stdout[-3000:]
    assert f"{name}: " in ran.stdout.rpartition("stage ")[2] + ran.stderr
    assert "step 1/3" not in ran.stdout


def test_the_entry_of_the_acceptance_image_trains(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    small = "--model resnet18 --batch-size 2 --image-size 32 --num-classes 10 --warmup-iterations 1 --repeats 1"
    ran = run("acceptance", f"/workspace/scripts/entrypoint.sh {small} --active-iterations 2 --processes 1")
    result = json.loads(ran.stdout)
    passed = {check["check"] for check in result["checks"] if check["findings"][0]["verdict"] == "pass"}
    assert {"accept_ranks", "accept_gradients"} <= passed


@pytest.mark.parametrize(("fault", "code"), [(None, 0), ("an NVLink that is down", 1)])
def test_the_program_of_the_sagemaker_image_judges_its_host(
    run: Callable[..., subprocess.CompletedProcess[str]], fault: str | None, code: int
) -> None:
    name, damage = SICK[fault] if fault else ("", None)
    ran = run("sagemaker", f"python3 -m trainmaster.sagemaker_job {' '.join(CHECKS)} --out /job/out", damage)
    assert ran.returncode == code, ran.stdout[-3000:] + ran.stderr[-2000:]
    assert name in ran.stdout


def test_an_output_that_cannot_be_written_is_found_out_first(
    run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """/opt/ml is SageMaker's own; without it the whole check ran before a traceback."""
    ran = run("sagemaker", f"python3 -m trainmaster.sagemaker_job {' '.join(CHECKS)}")
    assert ran.returncode == 2
    assert "/opt/ml/output/data" in ran.stderr and "Traceback" not in ran.stderr and "check gpu_count" not in ran.stdout
