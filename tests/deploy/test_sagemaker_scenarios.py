"""The scenarios of the SageMaker job, each with the processes and variables that SageMaker starts it with.

The hosts are recorded ones (a healthy GPU node), the ranks, the store and the collectives are real. Large scale is four
hosts of ml.p5.48xlarge with 32 EFA devices each, and two ranks a host instead of eight: eight real processes that meet.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from checks.nodes import efa
from fork_server import Child, ForkServer
from machines import H200, Machine
from warm_python import WarmPython, use

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((resources.files("trainmaster.report.health") / "metrics.schema.json").read_text())
SITE = '[all_reduce]\n"64K" = 0.000001\n[all_gather]\n"64K" = 0.000001\n[reduce_scatter]\n"64K" = 0.000001\n'
SITE += '[all_to_all]\n"64K" = 0.000001\n[broadcast]\n"64K" = 0.000001\n[sendrecv]\n"64K" = 0.000001\n'

pytestmark = pytest.mark.spawns


UUID = b"GPU-00000000"  # how the GPU of the capture is named


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


class Cluster:
    """Hosts of one job: a folder in place of S3, and a stand-in for `nvidia-smi -L` that lists the GPUs of a host."""

    def __init__(
        self,
        folder: Path,
        hosts: int,
        gpus: int,
        *,
        programs: ForkServer,
        python: WarmPython,
        instance: str = "ml.g5.12xlarge",
    ) -> None:
        self.folder, self.gpus, self.programs, self.python, self.instance = folder, gpus, programs, python, instance
        self.hosts = [f"algo-{number + 1}" for number in range(hosts)]
        self.port = free_port()
        tools = folder / "tools"
        tools.mkdir()
        smi = tools / "nvidia-smi"
        lines = "".join(f'echo "GPU {n}: NVIDIA A10G (UUID: GPU-{n})"\n' for n in range(gpus))
        smi.write_text(f"#!/bin/sh\n{lines}")
        smi.chmod(0o755)
        (folder / "site.toml").write_text(SITE)
        for number, host in enumerate(self.hosts):  # two machines never have the same GPU
            shutil.copytree(H200, folder / "captures" / host)
            if "p5" in instance:
                efa(Machine(folder / "captures" / host), 32)
            for path in (folder / "captures" / host).rglob("*"):
                if path.is_file() and UUID in (content := path.read_bytes()):
                    path.write_bytes(content.replace(UUID, UUID[:-1] + str(number).encode()))

    def environment(self, host: str) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SM_", "OMPI_", "SLURM_", "PET_"))}
        return {
            **clean, "PATH": f"{self.folder / 'tools'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src"),
            "SM_HOSTS": json.dumps(self.hosts), "SM_CURRENT_HOST": host, "SM_CURRENT_INSTANCE_TYPE": self.instance,
            "SM_MASTER_ADDR": "127.0.0.1", "SM_MASTER_PORT": self.port,
            "TRAINMASTER_METRICS_URL": str(self.folder / "bucket"), "TRAINING_JOB_NAME": "job-1",
            "SM_OUTPUT_DATA_DIR": str(self.folder / host / "out"),
        }  # fmt: skip

    def start(self, host: str, rank: Mapping[str, str], *words: str, out: Path) -> Child:
        argv = ["--level", "1", "--work", str(self.folder / "work"), "--max-size", "64K", "--wait", "120", *words]
        argv += ["--replay", str(self.folder / "captures" / host), "--baseline", str(self.folder / "site.toml")]
        program = "import runpy; runpy.run_module('trainmaster.sagemaker_job', run_name='__main__')"
        with out.open("wb") as file:
            return self.programs.start(
                "-c", program, *argv, env={**self.environment(host), **rank}, out=file.fileno(), err=file.fileno(),
                prepare=(f"{use.__module__}:{use.__name__}", str(self.python.path)),
            )  # fmt: skip

    def torchrun(self) -> list[tuple[str, dict[str, str]]]:
        return [
            (host, {
                "RANK": str(node * self.gpus + local), "WORLD_SIZE": str(len(self.hosts) * self.gpus),
                "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(self.gpus), "GROUP_RANK": str(node),
                "GROUP_WORLD_SIZE": str(len(self.hosts)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port,
            })
            for node, host in enumerate(self.hosts) for local in range(self.gpus)
        ]  # fmt: skip

    def mpi(self) -> list[tuple[str, dict[str, str]]]:
        """As SageMaker's mpirun starts them: no MASTER_ADDR."""
        return [
            (host, {
                "OMPI_COMM_WORLD_RANK": str(node * self.gpus + local),
                "OMPI_COMM_WORLD_SIZE": str(len(self.hosts) * self.gpus),
                "OMPI_COMM_WORLD_LOCAL_RANK": str(local), "OMPI_COMM_WORLD_LOCAL_SIZE": str(self.gpus),
            })
            for node, host in enumerate(self.hosts) for local in range(self.gpus)
        ]  # fmt: skip

    def none(self) -> list[tuple[str, dict[str, str]]]:
        return [(host, {}) for host in self.hosts]

    def run(self, launcher: str, *words: str) -> tuple[int, dict[str, Any], str]:
        placed = list(enumerate(getattr(self, launcher)()))
        logs = [self.folder / f"process-{number}.log" for number, _ in placed]
        started = [self.start(host, rank, *words, out=logs[number]) for number, (host, rank) in placed]
        for process in started:
            process.wait(timeout=170)
        said = [log.read_text() for log in logs]
        file = self.folder / "bucket" / "job-1" / "metrics" / "health_check_metrics.json"
        assert file.exists(), "\n".join(said)
        metrics = json.loads(file.read_text())
        jsonschema.validate(metrics, SCHEMA)
        assert all(process.returncode == 0 for process in started[1:]), "\n".join(said)
        return started[0].wait(), metrics, "\n".join(said)


Make = Callable[..., Cluster]


@pytest.fixture(scope="module")
def python(programs: ForkServer) -> Iterator[WarmPython]:
    made = WarmPython(programs)
    yield made
    made.close()


@pytest.fixture
def make(programs: ForkServer, python: WarmPython, tmp_path: Path) -> Make:
    return lambda hosts, gpus, **words: Cluster(tmp_path, hosts, gpus, programs=programs, python=python, **words)


@pytest.mark.matrix(one_in=16, of="SageMaker jobs on hosts of this machine")
@pytest.mark.parametrize(
    ("hosts", "gpus", "launcher"),
    [
        (1, 1, "none"), (1, 2, "torchrun"), (1, 2, "mpi"), (1, 2, "none"), (2, 1, "torchrun"), (2, 1, "mpi"),
        (2, 1, "none"), (2, 2, "mpi"),
    ],
    ids=[
        "one GPU", "GPUs-torchrun", "GPUs-mpi", "GPUs-none", "nodes-torchrun", "nodes-mpi", "nodes-none",
        "nodes and GPUs-mpi",
    ],
)  # fmt: skip
def test_a_healthy_cluster_passes_in_every_scenario(make: Make, hosts: int, gpus: int, launcher: str) -> None:
    cluster = make(hosts, gpus)
    code, metrics, said = cluster.run(launcher)
    assert (code, metrics["overall"]) == (0, "PASS"), said
    topology = metrics["cluster_info"]["cluster_topology"]
    assert (topology["total_nodes"], topology["processes_per_node"]) == (hosts, gpus)
    for number, node in enumerate(metrics["nodes"].values()):
        info = node["node_info"]
        assert (info["world_size"], info["rank"], info["local_rank"]) == (hosts * gpus, number * gpus, 0)
        assert (info["host_rank"], info["host_count"]) == (number, hosts)
        assert node["system"]["cpu"]["usage_percent"] is not None
        tests = node["nccl"]["communication_tests"]
        if hosts * gpus > 1:
            assert {"distributed_all_reduce", "distributed_all_gather"} <= set(tests)
            results = tests["distributed_all_reduce"]["results"]
            assert results[-1]["size_bytes"] == 64 << 10 and results[-1]["bandwidth_gbps"] > 0
            assert results[-1]["latency_ms"] > 0
            assert tests["distributed_all_reduce"]["processes_tested"] == hosts * gpus
        else:
            assert tests == {}
    assert metrics["cost"]["usd_per_hour"] == pytest.approx(5.67 * hosts, abs=0.02)
    assert "Price: EC2's price of the same machine" in said and "stated it" not in said, said


@pytest.mark.matrix(one_in=16, of="SageMaker jobs on hosts of this machine")
def test_without_a_figure_to_compare_with_it_is_a_warning_and_no_failure(make: Make, tmp_path: Path) -> None:
    cluster = make(1, 2)
    (tmp_path / "site.toml").write_text("")
    code, metrics, said = cluster.run("torchrun")
    assert (code, metrics["overall"]) == (0, "WARN"), said


@pytest.mark.matrix(one_in=16, of="SageMaker jobs on hosts of this machine")
def test_a_site_figure_that_is_missed_fails(make: Make, tmp_path: Path) -> None:
    cluster = make(1, 2)
    (tmp_path / "site.toml").write_text(SITE.replace("0.000001", "1e9"))
    code, metrics, said = cluster.run("torchrun")
    assert (code, metrics["overall"]) == (1, "FAIL"), said


@pytest.mark.matrix(one_in=16, of="SageMaker jobs on hosts of this machine")
def test_large_scale_four_hosts_of_p5(make: Make) -> None:
    cluster = make(4, 2, instance="ml.p5.48xlarge")
    # Gloo carries the ranks here, so the transport is stated; on p5 the job expects EFA by itself.
    code, metrics, said = cluster.run("torchrun", "--expect-transport", "Socket")
    assert (code, metrics["overall"]) == (0, "PASS"), said
    assert metrics["cluster_info"]["cluster_topology"]["total_nodes"] == 4
    assert [node["node_info"]["rank"] for node in metrics["nodes"].values()] == [0, 2, 4, 6]
    for node in metrics["nodes"].values():
        assert (node["network"]["efa_available"], node["network"]["efa_provider_count"]) == (True, 32)
        assert node["nccl"]["communication_tests"]["distributed_all_reduce"]["processes_tested"] == 8
    tests = metrics["cluster_summary"]["test_results"]
    assert (tests["efa_network"], tests["nccl_communication"], tests["gpu_detection"]) == ("PASS", "PASS", "PASS")
    assert metrics["cost"]["usd_per_hour"] > 4 * 30


@pytest.mark.matrix(one_in=16, of="SageMaker jobs on hosts of this machine")
def test_collectives_over_tcp_fail_where_sagemaker_attaches_efa(make: Make) -> None:
    cluster = make(2, 1, instance="ml.p5.48xlarge")
    code, metrics, said = cluster.run("torchrun")
    assert (code, metrics["overall"]) != (0, "PASS"), said
    bad = [row for row in metrics["metrics"] if row["check"] == "collective_transport"]
    assert bad and bad[0]["verdict"] in ("fail", "error"), said


@pytest.mark.matrix(one_in=16, of="SageMaker jobs on hosts of this machine")
def test_gpus_that_no_process_uses_make_it_incomplete(make: Make) -> None:
    cluster = make(2, 1)
    smi = cluster.folder / "tools" / "nvidia-smi"
    smi.write_text("#!/bin/sh\n" + "".join(f'echo "GPU {n}: NVIDIA A10G (UUID: GPU-{n})"\n' for n in range(4)))
    code, metrics, said = cluster.run("torchrun")
    assert (code, metrics["overall"]) == (3, "INCOMPLETE"), said
    assert "1 of 4 GPUs of this host take part" in " ".join(metrics["reasons"])


@pytest.mark.matrix(one_in=16, of="SageMaker jobs on hosts of this machine")
def test_results_of_another_job_in_the_same_place_are_not_taken(make: Make) -> None:
    """`--to` names one place for two jobs; in the second one the other host never starts."""
    cluster = make(2, 1)
    to = str(cluster.folder / "bucket" / "job-1" / "metrics")
    code, metrics, said = cluster.run("torchrun", "--to", to)
    assert (code, metrics["overall"]) == (0, "PASS"), said
    host, log = cluster.hosts[0], cluster.folder / "second.log"
    rank = {"TRAINING_JOB_NAME": "job-2", "SM_OUTPUT_DATA_DIR": str(cluster.folder / "second")}
    process = cluster.start(host, rank, "--to", to, "--wait", "0", out=log)
    process.wait(timeout=170)
    assert process.returncode == 3, log.read_text()
    second = json.loads((cluster.folder / "second" / "health" / "health_check_metrics.json").read_text())
    assert second["training_readiness"]["nodes_unknown"] == [cluster.hosts[1]]
