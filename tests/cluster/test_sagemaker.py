"""One process of a SageMaker job: ranks by every launcher, roles of the EFA test, and its verdicts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainmaster.checks import profiles
from trainmaster.cluster import sagemaker, sagemaker_node
from trainmaster.core.errors import UsageError
from trainmaster.core.results import Verdict
from trainmaster.node.host import Host
from trainmaster.storage import open_store

HOSTS = {"SM_HOSTS": '["algo-1", "algo-2", "algo-3"]', "SM_CURRENT_HOST": "algo-2"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_SIZE": "24", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
}  # fmt: skip


def test_mpi_without_a_master_address_meets_at_the_first_host() -> None:
    job = sagemaker.read_job({**HOSTS, **MPI})
    assert (job.distribution, job.rank, job.local_rank, job.first_on_node) == ("mpi", 9, 1, False)
    env = sagemaker.rank_environment(job)
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["GROUP_RANK"]) == ("algo-1", "7777", "1")
    named = sagemaker.read_job({**HOSTS, **MPI, "SM_MASTER_ADDR": "10.0.0.1", "SM_MASTER_PORT": "29500"})
    assert named.master == ("10.0.0.1", 29_500)


def test_without_a_launcher_a_host_starts_its_own_ranks() -> None:
    job = sagemaker.read_job(HOSTS)
    made = [sagemaker.rank_environment(job, local_rank=local, per_node=4) for local in range(4)]
    assert [env["RANK"] for env in made] == ["4", "5", "6", "7"]
    assert {env["WORLD_SIZE"] for env in made} == {"12"}
    assert sagemaker.read_job({}).hosts == ("localhost",)


@pytest.mark.parametrize(
    "env",
    [
        {"SM_HOSTS": "algo-1"}, {"SM_HOSTS": "[1]"}, {**HOSTS, "SM_CURRENT_HOST": "algo-9"},
        {**HOSTS, "OMPI_COMM_WORLD_RANK": "0"}, {**HOSTS, **MPI, "OMPI_COMM_WORLD_SIZE": "many"},
    ],
)  # fmt: skip
def test_an_environment_that_contradicts_itself_is_refused(env: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        sagemaker.read_job(env)


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("ml.g5.12xlarge", 0), ("ml.g5.8xlarge", 0), ("ml.g5.48xlarge", 1), ("ml.g4dn.12xlarge", 1),
        ("ml.g6.48xlarge", 0),
        ("ml.p4d.24xlarge", 4), ("ml.p5.48xlarge", 32), ("g5.12xlarge", 1),
    ],
)  # fmt: skip
def test_efa_is_expected_only_where_sagemaker_attaches_it(name: str, devices: int) -> None:
    assert profiles.resolve([name]).expect.efa_devices == devices


# --- EFA test ------------------------------------------------------------------------------------------------------


def install(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    install(folder, "fi_info", "echo 'provider: efa'")
    return folder


def ping(tmp_path: Path, here: str, **words: float) -> tuple[Verdict, dict[str, object]]:
    job = sagemaker.read_job({**HOSTS, "SM_CURRENT_HOST": here})
    store = open_store(str(tmp_path / "store"))
    wait_s = words.get("wait_s", 1.0)
    (found,) = sagemaker_node.ping(Host(), job, store, provider="efa", address=None, wait_s=wait_s)
    return found.verdict, dict(found.values)


@pytest.mark.spawns
def test_hosts_are_paired_and_each_reports_its_side(tmp_path: Path, tools: Path) -> None:
    install(tools, "fi_pingpong", 'echo "bytes #sent #ack total"; echo "64 10 =10 1.2k" "$@"')
    verdict, server = ping(tmp_path, "algo-1")
    assert (verdict, server["test_role"], server["partner"]) == (Verdict.PASS, "server", "algo-2")
    verdict, client = ping(tmp_path, "algo-2")
    assert (verdict, client["test_role"], client["rank"]) == (Verdict.PASS, "client", 0)
    assert "algo-1" in str(client["raw_output"])
    assert ping(tmp_path, "algo-3")[0] is Verdict.SKIP


@pytest.mark.spawns
def test_a_broken_or_absent_partner_is_no_pass(tmp_path: Path, tools: Path) -> None:
    install(tools, "fi_pingpong", "echo 'fi_connect: Connection refused' >&2; exit 1")
    assert ping(tmp_path, "algo-1")[0] is Verdict.FAIL
    assert ping(tmp_path / "other", "algo-2", wait_s=0.0)[0] is Verdict.ERROR


@pytest.mark.spawns
def test_a_host_without_efa_skips_with_its_proof(tmp_path: Path, tools: Path) -> None:
    install(tools, "fi_info", "echo 'fi_getinfo: -61 (No data available)' >&2; exit 61")
    job = sagemaker.read_job({**HOSTS, "SM_CURRENT_HOST": "algo-1"})
    (found,) = sagemaker_node.ping(Host(), job, open_store(str(tmp_path)), provider="efa", address=None, wait_s=1.0)
    assert found.verdict is Verdict.SKIP
    assert found.proof is not None and "fi_getinfo: -61" in found.proof
