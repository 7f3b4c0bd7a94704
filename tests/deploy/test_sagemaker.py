"""The SageMaker test: its files are sound, and its program gathers two hosts, or says which one is missing."""

from __future__ import annotations

import ast
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainmaster.sagemaker_job.gather import collectives

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "deploy" / "sagemaker"
NOTEBOOK = json.loads((PLACE / "notebook.ipynb").read_text())
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


# --- files ---------------------------------------------------------------------------------------------------------


def test_the_dockerfile_has_both_parts_and_what_is_required() -> None:
    _, _, rest = (ROOT / "Dockerfile").read_text().partition("### Customizable")
    text, end, _ = rest.partition("### End of the required part ###")
    mine, required = text.split("### Required Packages for the cluster test. DO NOT REMOVE ###")
    assert end and re.search(r"^FROM \${BASE_IMAGE:-.*} AS sagemaker$", mine, re.MULTILINE)
    for name in ("libfabric-dev", "datacenter-gpu-manager", "nccl-tests", "trainmaster[server,storage]"):
        assert name in required
    assert "&& dcgmi --version" in required, "an image without DCGM is not built"
    assert "ln -s /opt/nccl-tests /usr/local/cuda/efa/test-" in required
    assert 'pip install --no-cache-dir "psutil>=5.9.0"' in required
    assert "FROM" not in required


def create_image(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    argv = ["bash", str(PLACE / "create-image.sh"), *words]
    return subprocess.run(argv, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False)


def test_the_image_is_built_and_pushed_by_the_documented_words() -> None:
    subprocess.run(["bash", "-n", str(PLACE / "create-image.sh")], check=True)
    assert os.access(PLACE / "create-image.sh", os.X_OK)
    ran = create_image("sagemaker-cluster-test", "latest", DRY_RUN="1", AWS_REGION="eu-west-1")
    assert ran.returncode == 0, ran.stderr
    image = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/sagemaker-cluster-test:latest"
    assert ran.stdout.strip() == image
    assert "docker build --platform linux/amd64 --target sagemaker" in ran.stderr
    assert f"docker push {image}" in ran.stderr
    own = create_image(DRY_RUN="1", BASE_IMAGE="763104351884.dkr.ecr.us-east-1.amazonaws.com/x:1")
    assert "--password-stdin 763104351884.dkr.ecr.us-east-1.amazonaws.com" in own.stderr
    assert "--build-arg BASE_IMAGE=763104351884.dkr.ecr.us-east-1.amazonaws.com/x:1" in own.stderr


@pytest.mark.parametrize("words", [["a", "b", "c"], ["Upper"], ["x; reboot"], ["x", "-t"]])
def test_wrong_words_build_nothing(words: list[str]) -> None:
    ran = create_image(*words, DRY_RUN="1")
    assert ran.returncode == 2
    assert "usage" in ran.stderr
    assert "docker" not in ran.stderr


def test_the_notebook_is_one() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in NOTEBOOK["cells"]:
        assert cell["cell_type"] in ("markdown", "code")
        assert isinstance(cell["metadata"], dict)
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.parametrize("source", CODE, ids=range(len(CODE)))
def test_every_cell_compiles(source: str) -> None:
    compile(source, "cell", "exec")


@pytest.mark.parametrize(
    ("instance_type", "count", "scenario", "processes"),
    [
        ("ml.g5.xlarge", 1, "single-node-single-gpu", None),
        ("ml.g5.12xlarge", 1, "single-node-multi-gpu", 4),
        ("ml.g5.8xlarge", 2, "multi-node-single-gpu", 1),
        ("ml.p4d.24xlarge", 2, "multi-node-multi-gpu", 8),
        ("ml.p5.48xlarge", 4, "multi-node-multi-gpu", 8),
    ],
)
def test_the_notebook_needs_only_instance_type_and_count(
    instance_type: str, count: int, scenario: str, processes: int | None
) -> None:
    scope: dict[str, Any] = {"MPI": lambda **words: ("mpi", words), "Torchrun": lambda **words: ("torchrun", words)}
    for source in CODE:
        if "instance_count = " in source:
            text = re.sub(r'instance_type = ".*"', f'instance_type = "{instance_type}"', source)
            exec(re.sub(r"instance_count = \d+", f"instance_count = {count}", text), scope)
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.name == "make_distributed":
                exec(compile(ast.Module(body=[node], type_ignores=[]), "cell", "exec"), scope)
    assert scope["scenario"] == scenario
    for launcher in ("torchrun", "mpi"):
        made = scope["make_distributed"](launcher, count, scope["gpus"])
        assert made == ((launcher, {"process_count_per_node": processes}) if processes else None)
    assert scope["make_distributed"]("none", count, scope["gpus"]) is None
    assert any("subnet_ids = " in source and "security_group_ids = " in source for source in CODE)
    assert any("/metrics/health_check_metrics.json" in source for source in CODE)


def test_the_documented_folder_builds_the_image() -> None:
    script = ROOT / "compat" / "sagemaker-test" / "container" / "create-image.sh"
    argv = [str(script), "sagemaker-cluster-test", "latest"]
    ran = subprocess.run(argv, env={**os.environ, "DRY_RUN": "1"}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "docker build" in ran.stderr and ran.stdout.strip().endswith("sagemaker-cluster-test:latest")


@pytest.mark.matrix(one_in=16, of="SageMaker jobs on hosts of this machine")
def test_a_rank_that_crashed_after_its_report_is_not_hidden(tmp_path: Path) -> None:
    good = {"check": "collective_ranks", "findings": [{"verdict": "pass", "reason": "all met"}], "took_s": 1.0}
    (tmp_path / "bandwidth.json").write_text(json.dumps({"results": [good], "rows": [], "world": 2}))

    def verdicts(ran: str) -> list[str]:
        return [str(finding.verdict) for result in collectives(tmp_path, ran) for finding in result.findings]

    assert verdicts("ended with 0") == ["pass"]
    assert verdicts("ended with -11, not by themselves") == ["pass", "error"]
    (tmp_path / "bandwidth.json").unlink()
    assert verdicts("ended with 0") == ["error"]


# --- the program ---------------------------------------------------------------------------------------------------


def start(place: Path, host: str, hosts: list[str], *words: str, **env: str) -> subprocess.Popen[str]:
    """One process of the job, as SageMaker starts it on a host."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SM_", "OMPI_", "SLURM_"))}
    env = {
        **clean, "PYTHONPATH": str(ROOT / "src"), "SM_HOSTS": json.dumps(hosts), "SM_CURRENT_HOST": host,
        "TRAINMASTER_METRICS_URL": str(place / "bucket"), "TRAINING_JOB_NAME": "job-1",
        "SM_OUTPUT_DATA_DIR": str(place / host / "out"), **env,
    }  # fmt: skip
    argv = [sys.executable, "-m", "trainmaster.sagemaker_job", "--level", "1", "--work", str(place / "work"), *words]
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def metrics(place: Path) -> dict[str, object]:
    return json.loads((place / "bucket" / "job-1" / "metrics" / "health_check_metrics.json").read_text())


@pytest.mark.matrix(one_in=16, of="SageMaker jobs on hosts of this machine")
def test_two_hosts_give_one_verdict_with_collectives(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    hosts = ["algo-1", "algo-2"]
    rank = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    running = [
        start(
            tmp_path, host, hosts, "--max-size", "64K", "--min-busbw", "0.000001",
            **rank, MASTER_PORT=port, RANK=str(place), GROUP_RANK=str(place), GROUP_WORLD_SIZE="2",
        )
        for place, host in enumerate(hosts)
    ]  # fmt: skip
    said = [process.communicate(timeout=150)[0] for process in running]
    told = metrics(tmp_path)
    assert [node["node_info"]["hostname"] for node in told["nodes"].values()] == hosts, said  # type: ignore[attr-defined]
    checks = {row["check"]: row["verdict"] for row in told["metrics"]}  # type: ignore[attr-defined]
    assert checks["collective_ranks"] == checks["collective_data"] == "pass", said
    assert told["cluster_summary"]["performance_summary"]["distributed_all_reduce_bandwidth_gbps"] > 0  # type: ignore[index]
    assert str(told["overall"]) in said[0]
    assert running[0].returncode == {"PASS": 0, "WARN": 0, "FAIL": 1, "INCOMPLETE": 3}[str(told["overall"])]
    assert running[1].returncode == 0
    stored = tmp_path / "bucket" / "job-1" / "metrics"
    assert all((stored / "nodes" / host / "answers.json").exists() for host in hosts)
    assert (stored / "report.html").exists()


@pytest.mark.matrix(one_in=16, of="SageMaker jobs on hosts of this machine")
def test_a_host_that_does_not_answer_is_named(tmp_path: Path) -> None:
    process = start(tmp_path, "algo-1", ["algo-1", "algo-2"], "--wait", "0")
    said = process.communicate(timeout=100)[0]
    told = metrics(tmp_path)
    assert told["training_readiness"]["nodes_unknown"] == ["algo-2"], said  # type: ignore[index]
    assert "1 node gave no answer: algo-2" in said
    assert process.returncode in (1, 3)


def test_without_a_place_for_the_results_nothing_is_checked(tmp_path: Path) -> None:
    process = start(tmp_path, "algo-1", ["algo-1"], TRAINMASTER_METRICS_URL="")
    assert "no destination for the results" in process.communicate(timeout=60)[0]
    assert process.returncode == 2
