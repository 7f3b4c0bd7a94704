"""Files of examples/acceptance/ are what `trainmaster accept --dry-run` prints, and say what users were promised."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainmaster.bench.accept.options import Options
from trainmaster.cli.health.accept import render_file
from trainmaster.cluster.acceptance import files
from trainmaster.core.errors import UsageError

EXAMPLES = Path(__file__).parents[2] / "examples" / "acceptance"


def rendered(name: str, options: Options | None = None, *, image: str = files.IMAGE) -> str:
    return render_file(name, options or Options(), image=image)


@pytest.mark.parametrize("name", files.names())
def test_the_file_in_examples_is_what_dry_run_prints(name: str) -> None:
    assert (EXAMPLES / name).read_text() == rendered(name), (
        f"run: trainmaster accept --dry-run {name} > examples/acceptance/{name}"
    )


def test_every_file_that_guides_name_is_there() -> None:
    assert {
        "kubernetes-mixed-cluster.yaml", "kubernetes-flexible-nebius-pattern.yaml",
        "kubernetes-multi-gpu-nebius-optimized.yaml", "kubernetes-pytorch-multi-node.yaml",
        "kubernetes-with-auto-cleanup.yaml", "pytorchjob.yaml", "slurm-acceptance-test.sh", "slurm-nccl-test.sh",
        "acceptance_test.sh",
    } <= set(files.names())  # fmt: skip
    with pytest.raises(UsageError, match="pytorchjob"):
        rendered("job.yaml")


def job(name: str, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(rendered(name, **more))
    return found


@pytest.mark.parametrize("name", files.MANIFESTS)
def test_manifests_have_the_names_and_limits_of_the_guide(name: str) -> None:
    found = job(name)
    assert (found["kind"], found["metadata"]["name"]) == ("PyTorchJob", "gpu-cluster-acceptance-test")
    assert found["metadata"]["labels"] == {"app": "gpu-acceptance-test"}
    for replica in found["spec"]["pytorchReplicaSpecs"].values():
        assert replica["restartPolicy"] == "OnFailure"
        spec = replica["template"]["spec"]
        assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
        resources = spec["containers"][0]["resources"]
        assert resources["limits"] == resources["requests"]
        asked = {one["name"] for one in spec["containers"][0].get("env", ())}
        # A pod opens an adapter only where it asks for one: else NCCL falls back to TCP.
        assert any(one.startswith("rdma/") for one in resources["limits"]) == ("NCCL_IB_HCA" in asked)
    kept = found["spec"]["runPolicy"]
    assert kept["backoffLimit"] == 2, "a test that fails again and again must end"
    assert (kept.get("ttlSecondsAfterFinished") is not None) == (name == "kubernetes-with-auto-cleanup.yaml")


def test_the_standard_job_is_four_nodes_of_eight() -> None:
    replicas = job("pytorchjob.yaml")["spec"]["pytorchReplicaSpecs"]
    assert (replicas["Master"]["replicas"], replicas["Worker"]["replicas"]) == (1, 3)
    spec = replicas["Worker"]["template"]["spec"]
    assert spec["nodeSelector"] == {"accelerator": "nvidia-gpu"}
    assert spec["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert spec["containers"][0]["args"] == ["--batch-size", "64"]


def test_the_flexible_pattern_trains_on_fashion_mnist_with_shared_memory() -> None:
    spec = job("kubernetes-flexible-nebius-pattern.yaml")["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert " ".join(spec["containers"][0]["args"]) == (
        "--model resnet18 --data-mode fashion_mnist --data-dir /workspace/data --batch-size 128 --num-classes 10"
    )
    assert {one["name"]: one["mountPath"] for one in spec["containers"][0]["volumeMounts"]} == {
        "shm": "/dev/shm", "data": "/workspace/data",
    }  # fmt: skip
    assert spec["initContainers"][0]["command"][:2] == ["trainmaster", "check"]


def test_options_and_image_of_the_user_are_in_the_file() -> None:
    found = job("pytorchjob.yaml", options=Options(model="resnet18", active_iterations=7), image="registry/a:1")
    container = found["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    assert container["image"] == "registry/a:1"
    assert container["args"] == ["--model", "resnet18", "--batch-size", "64", "--active-iterations", "7"]
    assert "singularity pull docker://registry/a:1" in rendered("acceptance_test.sh", image="registry/a:1")
    assert "a_1.sif" in rendered("acceptance_test.sh", image="registry/a:1")


def test_words_of_the_user_stay_words_in_a_script() -> None:
    text = rendered("slurm-acceptance-test.sh", options=Options(data_mode="cifar10", data_dir="a b; rm -rf $HOME"))
    assert "--data-dir 'a b; rm -rf $HOME'" in text


@pytest.mark.parametrize("image", ["a b", "x\nrm -rf /", "$(id)", "", "-v"])
@pytest.mark.parametrize("name", ["bare-metal.sh", "pytorchjob.yaml"])
def test_an_image_that_is_no_name_is_refused(name: str, image: str) -> None:
    with pytest.raises(UsageError, match="--image"):
        rendered(name, image=image)


def test_the_batch_script_is_that_of_the_guide() -> None:
    text = rendered("acceptance_test.sh")
    for line in ("nodes=4", "ntasks-per-node=8", "gpus-per-task=1", "time=01:00:00", "output=acceptance-%j.out"):
        assert f"#SBATCH --{line}\n" in text
    assert "gpu_cluster_testing_latest.sif \\\n  /workspace/scripts/entrypoint.sh \\\n  --batch-size 64\n" in text
    forced = "NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_ALGO=Ring"
    assert forced in rendered("slurm-nccl-test.sh")


@pytest.mark.spawns
@pytest.mark.parametrize("name", [name for name in files.names() if name.endswith(".sh")])
def test_scripts_are_valid_shell(name: str) -> None:
    subprocess.run(["bash", "-n", str(EXAMPLES / name)], check=True)


DOCKER = """#!/bin/sh
case "$*" in *RANK=1*) exit {first} ;; *RANK=2*) exit {second} ;; esac
"""


@pytest.mark.parametrize(("codes", "whole"), [((0, 0), 0), ((3, 0), 3), ((1, 3), 1), ((3, 1), 1)])
def test_containers_on_bare_metal_end_with_the_worst_code(tmp_path: Path, codes: tuple[int, int], whole: int) -> None:
    (tmp_path / "docker").write_text(DOCKER.format(first=codes[0], second=codes[1]))
    (tmp_path / "docker").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "GPUS": "3"}
    script = ["bash", str(EXAMPLES / "bare-metal.sh")]
    done = subprocess.run([*script, "localhost", "3"], env=env, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (whole, "")
    alone = subprocess.run(script, env=env, check=False, capture_output=True, text=True)
    assert alone.returncode and "usage: bare-metal.sh MASTER_ADDR" in alone.stderr


@pytest.mark.parametrize(("codes", "whole"), [("0 0 0 0", 0), ("0 3 0 0", 3), ("1 0 3 0", 1), ("0 3 1 0", 1)])
def test_the_bandwidth_script_ends_with_fail_if_any_part_failed(tmp_path: Path, codes: str, whole: int) -> None:
    """srun is a stand-in that ends with one code after the other."""
    (tmp_path / "codes").write_text("\n".join(codes.split()) + "\n")
    (tmp_path / "srun").write_text("#!/bin/sh\ncode=$(head -n1 codes)\nsed -i 1d codes\nexit $code\n")
    (tmp_path / "srun").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    script = ["bash", str(EXAMPLES / "slurm-nccl-test.sh")]
    assert subprocess.run(script, env=env, cwd=tmp_path, check=False, capture_output=True).returncode == whole
