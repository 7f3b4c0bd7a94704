"""One process of a SageMaker job: ranks by every launcher, roles of the EFA test, and its verdicts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from trainmaster.checks import profiles
from trainmaster.cluster.sagemaker import job as sagemaker
from trainmaster.cluster.sagemaker import node as sagemaker_node
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


def ping(
    tmp_path: Path, here: str, *, wait_s: float = 1.0, devices: int | None = None
) -> list[tuple[Verdict, dict[str, object]]]:
    job = sagemaker.read_job({**HOSTS, "SM_CURRENT_HOST": here})
    store = open_store(str(tmp_path / "store"))
    found = sagemaker_node.ping(
        Host(), job, store, provider="efa", address=None, wait_s=wait_s, devices=devices
    )  # fmt: skip
    return [(finding.verdict, dict(finding.values)) for finding in found]


@pytest.mark.spawns
def test_hosts_are_paired_and_each_reports_its_side(tmp_path: Path, tools: Path) -> None:
    install(tools, "fi_pingpong", 'echo "bytes #sent #ack total"; echo "64 10 =10 1.2k" "$@"')
    served = ping(tmp_path, "algo-1")
    assert [(verdict, values["test_role"], values["partner"]) for verdict, values in served] == [
        (Verdict.PASS, "server", "algo-2"), (Verdict.PASS, "server", "algo-3"),
    ]  # fmt: skip
    ((verdict, client),) = ping(tmp_path, "algo-2")
    assert (verdict, client["test_role"], client["rank"]) == (Verdict.PASS, "client", 0)
    assert "algo-1" in str(client["raw_output"])
    ((verdict, odd),) = ping(tmp_path, "algo-3")
    assert (verdict, odd["test_role"], odd["partner"]) == (Verdict.PASS, "client", "algo-1")


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 5, 8, 9])
def test_every_host_has_a_partner_that_knows_it(hosts: int) -> None:
    names = [f"algo-{number}" for number in range(hosts)]
    roles = {
        name: sagemaker_node.find_pairs(sagemaker.read_job({"SM_HOSTS": json.dumps(names), "SM_CURRENT_HOST": name}))
        for name in names
    }
    clients = {(name, partner) for name, of in roles.items() for role, partner in of if role == "client"}
    servers = {(partner, name) for name, of in roles.items() for role, partner in of if role == "server"}
    assert clients == servers
    assert all(roles.values()) or hosts == 1


@pytest.mark.spawns
def test_a_broken_or_absent_partner_is_no_pass(tmp_path: Path, tools: Path) -> None:
    install(tools, "fi_pingpong", "echo 'fi_connect: Connection refused' >&2; exit 1")
    assert ping(tmp_path, "algo-1")[0][0] is Verdict.FAIL
    assert ping(tmp_path / "other", "algo-2", wait_s=0.0)[0][0] is Verdict.ERROR


@pytest.mark.spawns
@pytest.mark.parametrize("text", ["", "bytes   #sent   #ack     total", "64 10 8 1.2k"])
def test_a_ping_pong_without_a_finished_size_is_no_pass(tmp_path: Path, tools: Path, text: str) -> None:
    install(tools, "fi_pingpong", f"echo '{text}'")
    assert ping(tmp_path, "algo-1")[0][0] is Verdict.ERROR


@pytest.mark.spawns
def test_a_host_without_efa_skips_with_its_proof(tmp_path: Path, tools: Path) -> None:
    install(tools, "fi_info", "echo 'fi_getinfo: -61 (No data available)' >&2; exit 61")
    job = sagemaker.read_job({**HOSTS, "SM_CURRENT_HOST": "algo-1"})
    (found,) = sagemaker_node.ping(Host(), job, open_store(str(tmp_path)), provider="efa", address=None, wait_s=1.0)
    assert found.verdict is Verdict.SKIP
    assert found.proof is not None and "fi_getinfo: -61" in found.proof
    assert ping(tmp_path, "algo-1", devices=0)[0][0] is Verdict.SKIP


@pytest.mark.spawns
def test_a_host_that_should_have_efa_and_shows_none_is_an_error(tmp_path: Path, tools: Path) -> None:
    install(tools, "fi_info", "echo 'fi_getinfo: -61 (No data available)' >&2; exit 61")
    assert ping(tmp_path, "algo-1", devices=32)[0][0] is Verdict.ERROR
    install(tools, "fi_info", "echo 'fi_info: symbol lookup error' >&2; exit 127")
    assert ping(tmp_path, "algo-1", devices=32)[0][0] is Verdict.ERROR


# --- results of the hosts ------------------------------------------------------------------------------------------


def host_report(host: str, **facts: object) -> sagemaker_node.HostReport:
    told = {"rank": 0, "world_size": 16, "distribution": "torchrun", "processes_per_node": 8, "gpus": 8, **facts}
    return sagemaker_node.HostReport(host=host, facts=told)


def test_a_host_without_a_report_is_not_measured() -> None:
    reports = {"algo-1": host_report("algo-1")}
    (jobs,) = sagemaker_node.results(reports, {}, absent={"algo-2": "no report"})
    assert {finding.device: finding.verdict for finding in jobs.findings} == {"algo-1": "pass", "algo-2": "error"}


def test_gpus_without_a_rank_are_not_measured() -> None:
    reports = {"algo-1": host_report("algo-1"), "algo-2": host_report("algo-2", processes_per_node=1)}
    (jobs,) = sagemaker_node.results(reports, {})
    (bad,) = [finding for finding in jobs.findings if finding.verdict is Verdict.ERROR]
    assert (bad.device, bad.reason) == ("algo-2", "1 of 8 GPUs of this host take part in the collectives")


@pytest.mark.parametrize(
    ("ranks", "hosts", "size", "stall_s"),
    [
        (1, 1, "512M", 120), (4, 1, "512M", 120), (8, 1, "512M", 120), (2, 2, "2G", 300), (16, 2, "2G", 300),
        (32, 4, "2G", 300), (64, 8, "4G", 360), (128, 16, "8G", 420), (1024, 128, "16G", 600),
    ],
)  # fmt: skip
def test_parameters_follow_the_size_of_the_cluster(ranks: int, hosts: int, size: str, stall_s: int) -> None:
    chosen = sagemaker.scale(ranks=ranks, hosts=hosts)
    assert (chosen.max_size, chosen.stall_s) == (size, stall_s)
